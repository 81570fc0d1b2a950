// A rollout token by token: how likely each was, for whom, under which weights, and what it was worth.
import { Failed, ofRun } from "../api.js";
import { alpha, color, h, isOurs, replace, visible } from "../dom.js";
import { compact, fixed, isNumber, NOTHING, short } from "../format.js";
import { amend, go, to } from "../places.js";
import { SHADES, TokenCanvas, Tokens } from "../token_canvas.js";

const ORIGINS = ["context", "sampled", "tool output"];
const MOST_PAGES = 60;
const FIRST_TOKENS = 4000; // more than a window shows; the rest follows

export async function show(target, context) {
  const { run, parameters, alive } = context;
  const kind = parameters.kind || "step", step = Number(parameters.step), id = parameters.id;
  const branch = Number(parameters.branch ?? 0);
  const ask = (of, from, count) => ofRun(run, "tokens", { kind, step, id, branch: of, from, count }, alive);
  let page;
  try {
    page = await ask(branch, 0, FIRST_TOKENS);
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    target.append(h("div", { class: "panel empty" }, error.message), h("a", { href: to(run, "rollout", { kind: parameters.kind, step, id }) }, "The rollout"));
    return;
  }
  const rollout = { kind: parameters.kind, step, id };
  const info = page.branches[branch];
  const detail = h("aside", { class: "panel pad", "aria-live": "polite", "aria-label": "The token" });
  const ramp = h("div", { class: "bar small soft", style: { margin: "0", flex: "1", minWidth: "220px" } });
  const tokens = new Tokens();
  tokens.append(page);
  const fork = page.branches[branch > 0 ? branch - 1 : 1]?.forks_at ?? null; // from the branch before it
  const main = new TokenCanvas(tokens, { fork, onChoose: (at) => drawDetail(detail, tokens, at, page), label: `Branch ${info.branch}` });
  const shown = [main];
  const setShade = (name) => { for (const one of shown) { one.shade = name; one.later(); } amend({ by: name === "logprob" ? "" : name }); drawRamp(ramp, name); };
  const shades = Object.entries(SHADES).filter(([, { needs }]) => tokens.columns[needs]);
  const by = shades.some(([name]) => name === parameters.by) ? parameters.by : "logprob";
  const views = h("div", { class: "side", style: { overflow: "hidden", padding: "0" } }, wrap(main.element));
  const other = async (place) => {
    for (const one of shown.splice(1)) { one.destroy(); one.element.parentElement.remove(); }
    main.fork = place === "" ? fork : page.branches[Number(place)].forks_at;
    if (place === "") { main.resize(); return; }
    const found = await ask(Number(place), 0, FIRST_TOKENS), theirs = new Tokens();
    theirs.append(found);
    const beside = new TokenCanvas(theirs, { fork: main.fork, onChoose: (chosen) => drawDetail(detail, theirs, chosen, found), label: `Branch ${found.branches[Number(place)].branch}` });
    beside.shade = main.shade;
    shown.push(beside);
    views.append(wrap(beside.element));
    requestAnimationFrame(() => { for (const one of shown) { one.resize(); one.show(one.fork ?? 0, true); } });
    await rest(theirs, found, Number(place), beside);
  };
  const rest = async (into, found, of, canvas) => {
    const { num_tokens } = found.branches[of];
    for (let pages = 1; into.count < num_tokens && pages < MOST_PAGES && !alive.aborted; pages++) {
      const next = await ask(of, into.count);
      if (!next.texts.length) break;
      into.append(next);
      canvas.update();
    }
    if (into.count < num_tokens && !alive.aborted) target.append(h("p", { class: "soft" }, `The first ${compact(into.count)} of ${compact(num_tokens)} tokens are here.`));
  };
  const missing = h("span", { class: "soft", role: "status" });
  const find = (text) => {
    main.found = tokens.find(text, main.chosen);
    missing.textContent = main.found ? "" : tokens.count < info.num_tokens ? "not in the tokens that are here" : "not found";
    main.later();
    choose(main.found?.[0] ?? -1);
  };
  const choose = (at) => { if (at >= 0) { main.choose(at); main.show(at, true); } };
  document.addEventListener("keydown", (event) => { if (isOurs(event) && event.key === "u") go(run, "rollout", rollout); }, { signal: alive });
  target.append(
    h("div", { class: "bar" }, h("a", { href: to(run, "rollout", rollout) }, "‹ rollout"), h("h1", {}, visible(page.rollout_id)), h("span", { class: "soft" }, `${compact(info.num_completion_tokens)} sampled of ${compact(info.num_tokens)} tokens · reward ${fixed(page.reward)} · ${[page.outcome, page.reason].filter(Boolean).join(": ")}`),
      !page.has_context && h("span", { class: "badge", title: "Only the trainer's export is there: each · is a token that it did not train on. observability.tokens_every_steps writes the others" }, "without its context"),
      !page.is_exported && h("span", { class: "badge", title: "trainer.export_tokens writes ratio, entropy and loss of each trained token" }, "without the trainer's values")),
    h("div", { class: "bar" },
      h("label", {}, "colour", h("select", { "aria-label": "Colour tokens by", onchange: (event) => setShade(event.target.value) }, shades.map(([value, { title }]) => h("option", { value, selected: value === by }, title)))), ramp,
      page.branches.length > 1 && h("label", {}, "branch", h("select", { "aria-label": "Branch", onchange: (event) => go(run, "tokens", { ...parameters, branch: event.target.value }) }, page.branches.map((one, place) => h("option", { value: place, selected: place === branch }, `${one.branch}: ${compact(one.num_tokens)} tokens`)))),
      page.branches.length > 1 && h("label", {}, "beside", h("select", { "aria-label": "Beside it", onchange: (event) => other(event.target.value) }, h("option", { value: "" }, "nothing"), page.branches.map((one, place) => place !== branch && h("option", { value: place }, `${one.branch}`)))),
      fork !== null && h("button", { onclick: () => choose(Math.min(main.fork, tokens.count - 1)) }, "to the fork"),
      h("button", { onclick: () => choose(leastLikely(tokens, main.chosen)), title: "And again: the next" }, "least likely"),
      h("input", { type: "search", placeholder: "Find a text", "aria-label": "Find a text", size: 14, onkeydown: (event) => { if (event.key === "Enter" && event.target.value) find(event.target.value); } }), missing),
    h("div", { class: "tokens" }, views, detail));
  main.shade = by;
  drawRamp(ramp, by);
  drawDetail(detail, tokens, -1, page);
  alive.addEventListener("abort", () => shown.forEach((one) => one.destroy()));
  context.start = async () => {
    main.resize();
    await rest(tokens, page, branch, main);
    const at = Number(parameters.at ?? -1);
    if (at >= 0) choose(at);
  };
}

export const shown = (_target, context) => { context.start?.().catch((error) => { if (error.name !== "AbortError") throw error; }); };

/** The least likely token of those likelier than the chosen one; -1 without one. */
function leastLikely(tokens, chosen) {
  const floor = (chosen >= 0 ? tokens.get("logprobs", chosen) : null) ?? -Infinity;
  let best = -1, low = Infinity;
  for (let at = 0; at < tokens.count; at++) {
    const value = tokens.get("logprobs", at);
    if (value !== null && value > floor && value < low) [best, low] = [at, value];
  }
  return best;
}

const wrap = (element) => h("section", { style: { flex: "1 1 0", minWidth: "0" } }, element);

function drawRamp(target, name) {
  const { ends } = SHADES[name];
  const [from, until] = { ratio: ["bad", "s0"], advantage: ["bad", "s0"], entropy: [null, "s3"], mask: ["good", "warn"], version: ["s0", "s3"] }[name] ?? [null, "s2"];
  const paint = (one) => (one ? alpha(color(one), 0.75) : "transparent");
  replace(target, h("span", {}, ends[0]), h("div", { class: "ramp", style: { background: `linear-gradient(90deg, ${paint(from)}, ${from ? "transparent" : paint(null)}, ${paint(until)})` } }), h("span", {}, ends[1]));
}

/** All that is known of a token, for the side of a view. */
export function drawDetail(target, tokens, at, page) {
  if (at < 0 || at >= tokens.count) {
    replace(target, h("p", { class: "soft" }, "Point at a token, or choose one with the arrow keys, to see all of its values."), h("p", { class: "soft" }, "Context is grey, tool output underlined, what was sampled is coloured."));
    return;
  }
  const value = (name) => tokens.get(name, at);
  const logprob = value("logprobs"), trained = value("trainer_logprobs"), version = value("versions"), size = value("support_sizes");
  const rows = [
    ["position", compact(at)], isNumber(value("token_ids")) && ["id", String(value("token_ids"))], ["from", ORIGINS[value("origins")] ?? NOTHING],
    version >= 0 && ["policy version", `${version}${page.outcome === "trained" ? ` (${page.step - 1 - version} behind when trained)` : ""}`],
    isNumber(logprob) && ["generator", `${fixed(logprob, 4)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`],
    isNumber(trained) && ["trainer", `${fixed(trained, 4)} (${(100 * Math.exp(trained)).toPrecision(3)} %)`],
    isNumber(value("ratios")) && ["ratio", fixed(value("ratios"), 4)], isNumber(value("entropies")) && ["entropy", fixed(value("entropies"), 4)],
    isNumber(value("advantages")) && ["advantage", fixed(value("advantages"), 4)], isNumber(value("losses")) && ["loss", short(value("losses"))],
    value("origins") === 1 && value("loss_mask") !== null && ["bears loss", value("loss_mask") ? (value("kept") === false && value("is_trained") ? "no: rejected by the loss" : "yes") : "no: masked"],
    size > 0 && ["sampled from", `${compact(size)} tokens`],
  ];
  const others = value("alternatives") ?? [];
  replace(target, h("h3", {}, "Token"), h("pre", { class: "text mono panel pad", dir: "auto" }, visible(value("texts").replaceAll("\n", "⏎")) || "(empty)"),
    h("dl", { class: "facts" }, rows.filter(Boolean).map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
    others.length > 0 && h("div", {}, h("h3", { style: { marginTop: "8px" } }, "Likeliest"), h("table", {}, h("tbody", {}, others.map(([text, each]) => h("tr", {}, h("td", { class: "mono" }, visible(text.replaceAll("\n", "⏎"))), h("td", { class: "num" }, `${(100 * Math.exp(each)).toPrecision(3)} %`)))))));
}
