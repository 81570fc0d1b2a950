// Elements, and text that cannot become anything but text: nothing here ever parses HTML.

/** An element: properties by name (`class`, `onclick`, `aria-...`), then children; strings become text nodes. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return element;
}

const keyOf = (element) => element.dataset.key ?? element.getAttribute("aria-label");

/** Draws anew. What had the focus has it again: what has the same `data-key`, or else label. */
export function replace(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (focused) [...parent.querySelectorAll("[data-key], [aria-label]")].find((one) => keyOf(one) === focused)?.focus({ preventScroll: true });
}

/** Tells whether somebody types into a field of it, so that what stands there is not taken yet. */
export function typing(target) {
  let is = false;
  target.addEventListener("input", () => { is = true; });
  for (const end of ["change", "focusout"]) target.addEventListener(end, () => { is = false; });
  return () => is;
}

// Controls, escapes of terminals, marks that turn the direction of what follows, tags, other separators of lines, lone
// surrogates. What joins letters and emoji, or keeps them apart, is seen by these.
const UNSEEN = /(?![\n\t\p{Join_Control}])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** A text of a model or a task, with what nobody would see, or what would move the rest about, as an escape. */
export function visible(text) {
  return text.replace(UNSEEN, (one) => {
    const code = one.codePointAt(0), digits = code.toString(16);
    return code < 0x100 ? `\\x${digits.padStart(2, "0")}` : code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\u{${digits}}`;
  });
}

/** A block of somebody's text, in its own direction. */
export function textBlock(text, properties) {
  return h("pre", { class: "text", dir: "auto", ...properties }, visible(text));
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour of the page, seen through: `#0b7a70` → `rgb(11 122 112 / 0.2)`. */
export function alpha(hex, share) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgb(${red} ${green} ${blue} / ${share})`;
}

/** Whether a key is for the page: nobody types it into a field, and it is no shortcut of the browser's (Alt and an arrow leads back). */
export function isOurs(event) {
  const isTyped = event.target instanceof HTMLElement && event.target.closest("input, textarea, select") !== null;
  return !isTyped && !event.ctrlKey && !event.metaKey && !event.altKey;
}

const BADGES = { running: "live", finished: "good", failed: "bad", crashed: "bad", cancelled: "warn" };

/** Whether more may come: of another library's files nobody says that it won't. */
export const isLive = (state) => state === "running" || state === "read";

export const stateClass = (state) => BADGES[state] ?? "";

/** Whether a run goes on is not known while nobody tells. */
export function stateBadge(state, isLost = false) {
  const known = isLost && isLive(state) ? "not known" : state;
  return h("span", { class: `badge ${stateClass(known)}` }, known);
}

/** In place of what is made of a run's trace, where it has none and will have none; null where it may. */
export const untraced = ({ is_traced, row }) => (is_traced ? null : h("div", { class: "panel empty" }, row.state === "read" ? "This is another library's file, which has no trace." : "This run writes no trace (observability.trace_mb is 0)."));

let tip = null;

/** Shows a line beside the pointer; without text, none. */
export function showTip(text, x, y) {
  if (!text) {
    tip?.remove();
    tip = null;
    return;
  }
  if (!tip) {
    tip = h("div", { class: "tip", role: "tooltip" });
    document.body.append(tip);
  }
  tip.textContent = text;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}
