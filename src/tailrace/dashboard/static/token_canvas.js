// Tokens as text on a canvas that is as large as its window, whatever their number: only what is seen is drawn.
import { alpha, color, h, visible } from "./dom.js";

const LINE = 20, PAD = 8, FONT = '13px ui-monospace, "DejaVu Sans Mono", Menlo, monospace';
const SAMPLED = 1, TOOL = 2;

/** Columns of `token_view.TokenPage`, as far as they are here. */
export class Tokens {
  constructor() {
    this.count = 0;
    this.columns = {};
  }

  append(page) {
    for (const [name, values] of Object.entries(page)) {
      if (!Array.isArray(values) || name === "branches") continue;
      const column = (this.columns[name] ??= []);
      for (const value of values) column.push(value);
    }
    this.count = this.columns.texts.length;
  }

  get(name, at) {
    return this.columns[name]?.[at] ?? null;
  }

  /** The first and the last token of the next place behind token `after` where a text stands, else of the first; null without one. */
  find(text, after) {
    const ends = [];
    let whole = "";
    for (const each of this.columns.texts) ends.push((whole += each).length);
    const next = whole.indexOf(text, ends[after] ?? 0), at = next >= 0 ? next : whole.indexOf(text);
    return at < 0 ? null : [at, at + text.length - 1].map((place) => ends.findIndex((end) => end > place));
  }
}

/** What colours a token by: the strength from 0 to 1 and the colour; null leaves it plain. */
export const SHADES = {
  logprob: { title: "log-probability", needs: "logprobs", ends: ["0", "−6 nats and less"], shade: (tokens, at) => one("s2", -tokens.get("logprobs", at) / 6, tokens.get("logprobs", at)) },
  ratio: { title: "ratio", needs: "ratios", ends: ["÷ 2", "× 2"], shade: (tokens, at) => two(Math.log2(tokens.get("ratios", at)), tokens.get("ratios", at)) },
  advantage: { title: "advantage", needs: "advantages", ends: ["lowest", "highest"], shade: (tokens, at, scale) => two(tokens.get("advantages", at) / scale.advantages, tokens.get("advantages", at)) },
  entropy: { title: "entropy", needs: "entropies", ends: ["0", "3 nats and more"], shade: (tokens, at) => one("s3", tokens.get("entropies", at) / 3, tokens.get("entropies", at)) },
  version: { title: "policy version", needs: "versions", ends: ["oldest", "newest"], shade: (tokens, at, scale) => { const version = tokens.get("versions", at); return version === null || version < 0 ? null : [`s${(version - scale.oldest) % 8}`, 0.45]; } },
  mask: { title: "mask", needs: "loss_mask", ends: ["bears loss", "too old, or rejected"], shade: (tokens, at) => (tokens.get("origins", at) !== SAMPLED ? null : !tokens.get("loss_mask", at) ? ["warn", 0.45] : tokens.get("kept", at) === false && tokens.get("is_trained", at) ? ["bad", 0.5] : ["good", 0.3]) },
};

const one = (name, strength, value) => (value === null ? null : [name, Math.max(0, Math.min(0.85, strength * 0.85))]);
const two = (strength, value) => (value === null || !Number.isFinite(strength) ? null : [strength < 0 ? "bad" : "s0", Math.min(0.8, Math.abs(strength) * 0.8)]);

export class TokenCanvas {
  constructor(tokens, { onChoose, fork = null, label = "Tokens" }) {
    Object.assign(this, { tokens, onChoose, fork, shade: "logprob", chosen: -1, hovered: -1, found: null, laidOut: 0 });
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.room = h("div", {}, this.canvas);
    this.element = h("div", { class: "panel viewport", tabindex: "0", role: "application", "aria-label": `${label}: arrow keys choose a token` }, this.room);
    this.widths = new Map();
    this.pen = this.canvas.getContext("2d");
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.element);
    this.element.addEventListener("scroll", () => this.later());
    this.element.addEventListener("pointermove", (event) => { const at = this.under(event); if (at !== this.hovered) { this.hovered = at; this.later(); this.onChoose(at >= 0 ? at : this.chosen); } });
    this.element.addEventListener("pointerleave", () => { this.hovered = -1; this.later(); this.onChoose(this.chosen); });
    this.element.addEventListener("click", (event) => this.choose(this.under(event)));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  destroy() {
    this.resizing.disconnect();
    cancelAnimationFrame(this.frame);
  }

  resize() {
    const width = this.element.clientWidth, height = this.element.clientHeight;
    if (width < 40 || !height) return;
    const scale = devicePixelRatio || 1;
    const isOther = width !== this.width;
    Object.assign(this, { width, height });
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    if (isOther) this.laidOut = 0;
    this.layOut();
    this.draw();
  }

  /** Where each token is: only those that came since are measured. */
  layOut() {
    if (!this.width) return;
    if (this.laidOut === 0) Object.assign(this, { xs: [], lines: [], starts: [0], shown: [], x: PAD, scale: { oldest: Infinity, advantages: 0 } });
    this.pen.font = FONT;
    const right = this.width - PAD;
    for (let at = this.laidOut; at < this.tokens.count; at++) {
      const text = this.tokens.get("texts", at) ?? "";
      const shown = visible(text.replaceAll("\t", "⇥").replaceAll("\n", "⏎").replaceAll("\r", "␍")).replaceAll(" ", "\u00a0") || (this.tokens.get("token_ids", at) < 0 ? "·" : "∅");
      const width = this.widthOf(shown);
      if (this.x + width > right && this.x > PAD) this.breakLine(at);
      this.xs.push(this.x);
      this.lines.push(this.starts.length - 1);
      this.shown.push(shown);
      this.x += width;
      if (text.includes("\n")) this.breakLine(at + 1);
      const version = this.tokens.get("versions", at), advantage = Math.abs(this.tokens.get("advantages", at) ?? 0);
      if (version !== null && version >= 0 && version < this.scale.oldest) this.scale.oldest = version;
      if (advantage > this.scale.advantages) this.scale.advantages = advantage;
    }
    this.laidOut = this.tokens.count;
    this.room.style.height = `${this.starts.length * LINE + 2 * PAD}px`;
  }

  breakLine(next) {
    this.starts.push(next);
    this.x = PAD;
  }

  widthOf(text) {
    let width = this.widths.get(text);
    if (width === undefined) this.widths.set(text, (width = this.pen.measureText(text).width));
    return width;
  }

  later() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  update() {
    this.layOut();
    this.later();
  }

  draw() {
    if (!this.width || !this.starts) return;
    const { pen } = this, top = this.element.scrollTop;
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const paints = { text: color("text"), soft: color("soft"), faint: color("faint"), tool: color("tool"), accent: color("accent") };
    const shades = Object.fromEntries(["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "good", "warn", "bad"].map((name) => [name, color(name)]));
    const { shade } = SHADES[this.shade];
    const first = Math.max(0, Math.floor((top - PAD) / LINE)), last = Math.min(this.starts.length - 1, Math.ceil((top + this.height) / LINE));
    const end = last + 1 < this.starts.length ? this.starts[last + 1] : this.laidOut;
    for (let at = this.starts[first] ?? 0; at < end; at++) {
      const x = this.xs[at], y = PAD + this.lines[at] * LINE - top, width = this.widthOf(this.shown[at]);
      const tint = shade(this.tokens, at, this.scale), origin = this.tokens.get("origins", at);
      if (tint && tint[1] > 0.01) { pen.fillStyle = alpha(shades[tint[0]], tint[1]); pen.fillRect(x, y + 1, Math.max(2, width - 0.5), LINE - 2); }
      if (origin === TOOL) { pen.fillStyle = paints.tool; pen.fillRect(x, y + LINE - 3, width, 1.5); }
      if (at === this.fork) { pen.fillStyle = paints.accent; pen.fillRect(x - 1, y - 1, 2, LINE + 2); }
      if (this.found && at >= this.found[0] && at <= this.found[1]) { pen.fillStyle = paints.accent; pen.fillRect(x, y + LINE - 2, width, 2); }
      pen.fillStyle = origin === SAMPLED ? paints.text : origin === TOOL ? paints.tool : this.fork !== null && at < this.fork ? paints.faint : paints.soft;
      pen.fillText(this.shown[at], x, y + LINE / 2 + 0.5, Math.max(this.width - PAD - x, 1));
      if (at === this.chosen || at === this.hovered) { pen.strokeStyle = paints.accent; pen.lineWidth = at === this.chosen ? 2 : 1; pen.strokeRect(x + 0.5, y + 1, Math.max(3, width - 1), LINE - 2); }
    }
  }

  under(event) {
    const place = this.element.getBoundingClientRect();
    const line = Math.floor((event.clientY - place.top + this.element.scrollTop - PAD) / LINE), x = event.clientX - place.left;
    if (!this.starts || line < 0 || line >= this.starts.length) return -1;
    const end = this.starts[line + 1] ?? this.laidOut;
    for (let at = this.starts[line]; at < end; at++) if (x >= this.xs[at] && x < this.xs[at] + this.widthOf(this.shown[at])) return at;
    return -1;
  }

  choose(at) {
    if (at < 0 || at >= this.tokens.count) return;
    this.chosen = at;
    this.show(at);
    this.onChoose(at);
    this.later();
  }

  /** Scrolls as little as it takes; `middle` puts the token's line there. */
  show(at, middle = false) {
    const y = PAD + (this.lines?.[at] ?? 0) * LINE, { scrollTop, clientHeight } = this.element;
    if (middle) this.element.scrollTop = y - clientHeight / 3;
    else if (y < scrollTop) this.element.scrollTop = y - PAD;
    else if (y + LINE > scrollTop + clientHeight) this.element.scrollTop = y + LINE - clientHeight + PAD;
  }

  key(event) {
    const line = this.lines?.[this.chosen] ?? 0;
    const beside = (to) => { const start = this.starts[to]; if (start === undefined) return this.chosen; const end = (this.starts[to + 1] ?? this.laidOut) - 1; let at = start; while (at < end && this.xs[at + 1] <= this.xs[this.chosen]) at++; return at; };
    const next = { ArrowRight: () => this.chosen + 1, ArrowLeft: () => Math.max(0, this.chosen - 1), ArrowDown: () => beside(line + 1), ArrowUp: () => beside(Math.max(0, line - 1)), Home: () => 0, End: () => this.tokens.count - 1 }[event.key];
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    this.choose(next());
  }
}
