// Curves: uPlot in the page's colours, with smoothing, bands and a legend that follows the pointer.
import uPlot from "./vendor/uPlot.js";
import { alpha, color, h } from "./dom.js";
import { clock, compact, isNumber, short, NOTHING } from "./format.js";

/** What curves can be drawn over, and how places of it are shown. */
export const AXES = { step: ["step", String], tokens: ["sampled tokens", compact], wall: ["time", clock] };

const COLORS = 8;
export const seriesColor = (index) => color(`s${index % COLORS}`);

/** An exponential average; gaps stay gaps. `weight` 0 leaves all as it is. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, of = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    of = weight * of + (1 - weight);
    return sum / of;
  });
}

/** Lines of different lengths over one axis: `[{ xs, ys }]` → `[xs, ys, ys, ...]`, sorted, null where a line has no point. */
export function aligned(lines) {
  const all = new Set();
  for (const { xs, ys } of lines) for (let i = 0; i < xs.length; i++) if (ys[i] !== null && xs[i] !== null) all.add(xs[i]);
  const xs = Float64Array.from(all).sort();
  const place = new Map();
  xs.forEach((x, i) => place.set(x, i));
  return [Array.from(xs), ...lines.map((line) => {
    const column = new Array(xs.length).fill(null);
    for (let i = 0; i < line.xs.length; i++) if (line.ys[i] !== null && line.xs[i] !== null) column[place.get(line.xs[i])] = line.ys[i];
    return column;
  })];
}

/**
 * A chart in a panel. `lines` are `{ label, xs, ys, color?, width?, dash?, points?, faint?, hidden? }`, `bands` `[upper, lower]` places of
 * lines between which it is filled. `update(lines, bands)` draws other values.
 */
export class Chart {
  constructor({ title, unit = "", wide = false, height = 150, log = false, show = short, sync = null, onPick = null }) {
    Object.assign(this, { log, show, sync, onPick, height, showX: String });
    this.legend = h("div", { class: "legend" });
    this.place = h("div", {});
    this.element = h("section", { class: `panel chart${wide ? " wide" : ""}`, "aria-label": title, style: { minHeight: `${height + 46}px` } },
      h("h3", {}, title, h("span", { class: "unit", title: unit }, unit)), this.place, this.legend);
    this.resizing = new ResizeObserver(() => this.fit());
    this.resizing.observe(this.element);
  }

  fit() {
    const width = this.element.clientWidth - 16;
    if (this.plot && width > 40 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    else if (!this.plot && this.lines && width > 40) this.draw();
  }

  update(lines, bands = []) {
    this.lines = lines;
    this.bands = bands;
    const shape = JSON.stringify([this.showX === String, lines.map((line) => [line.label, line.color, line.faint, line.dash, line.points]), bands]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(aligned(lines));
      this.showLegend(null);
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = null;
      if (this.element.isConnected) this.draw();
    }
  }

  draw() {
    const width = this.element.clientWidth - 16;
    if (width <= 40 || !this.lines) return;
    const [grid, faint, soft] = [color("line"), color("faint"), color("soft")];
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 3 };
    const data = aligned(this.lines);
    const options = {
      width, height: this.height, legend: { show: false }, padding: [6, 8, 0, 0],
      cursor: { sync: this.sync ? { key: this.sync, setSeries: false } : undefined, points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: this.log ? { distr: 3, clamp: 1e-6 } : { range: (_, low, high) => padded(low, high) } },
      axes: [{ ...axis, size: 22, incrs: this.showX === String ? WHOLE : undefined, values: (_, ticks) => ticks.map(this.showX) }, { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.show(tick))) }],
      series: [{}, ...this.lines.map((line, index) => ({
        label: line.label, stroke: line.faint ? alpha(line.color ?? seriesColor(index), 0.25) : line.color ?? seriesColor(index),
        width: line.width ?? (line.faint ? 1 : 1.6), dash: line.dash, spanGaps: true, points: { show: (plot, at) => !line.hidden && (line.points || isPoint(plot.data[at])), size: 5 },
      }))],
      bands: this.bands.map(([upper, lower, index]) => ({ series: [upper + 1, lower + 1], fill: alpha(this.lines[index]?.color ?? seriesColor(index), 0.14) })),
      hooks: { setCursor: [(plot) => this.showLegend(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, data, this.place);
    if (this.onPick) {
      this.plot.over.style.cursor = "pointer";
      let down = null;
      this.plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
      this.plot.over.addEventListener("click", (event) => {
        const index = this.plot.cursor.idx;
        if (index !== null && index !== undefined && down !== null && Math.abs(event.clientX - down) < 4) this.onPick(this.plot.data[0][index]);
      });
    }
    this.showLegend(null);
  }

  /** Values at the pointer, or the newest. */
  showLegend(index) {
    if (!this.plot) return;
    const [xs, ...columns] = this.plot.data;
    const entries = this.lines.map((line, number) => {
      if (line.faint || line.hidden) return null;
      let at = index ?? xs.length - 1;
      while (index === null && at > 0 && (columns[number][at] ?? null) === null) at--;
      const value = columns[number]?.[at];
      return h("span", {}, h("i", { class: "swatch", style: { background: line.color ?? seriesColor(number) } }), ` ${line.label} `, h("b", {}, value === null || value === undefined ? NOTHING : this.show(value)));
    });
    this.legend.replaceChildren(...[index === null || index === undefined ? null : h("span", { class: "faint" }, this.showX(xs[index])), ...entries].filter(Boolean));
  }

  destroy() {
    this.resizing.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/** Whether there are too few values for a line. */
const isPoint = (values) => values.findIndex(isNumber) === values.findLastIndex(isNumber);

const WHOLE = [1, 2, 5].flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((power) => one * power)).sort((a, b) => a - b);

/** An axis for these values, with some room. */
export function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  // an average of equal values differs in its last bits: uPlot would make an axis of millions of ticks between them
  if (high - low <= size * 1e-9) return [low - (size * 0.1 || 0.5), high + (size * 0.1 || 0.5)];
  const room = (high - low) * 0.06;
  return [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
}
