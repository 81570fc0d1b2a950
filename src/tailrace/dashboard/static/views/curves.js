// A run's curves, what is wrong with it, and where it stands.
import { ofRun } from "../api.js";
import { AXES, Chart, smoothed } from "../charts.js";
import { CurveStore } from "../curve_store.js";
import { h, replace } from "../dom.js";
import { bytes, clock, compact, fixed, percent } from "../format.js";
import { PANELS, EVERY_NAME, labelOf, namesOf } from "../panels.js";
import { amend, go } from "../places.js";

export async function show(target, context) {
  const { run, parameters, alive } = context;
  const extra = (parameters.metrics ?? "").split(",").filter(Boolean);
  const store = new CurveStore(run, [...EVERY_NAME, ...extra]);
  const [advice] = await Promise.all([ofRun(run, "advice", {}, alive), store.update(alive)]);
  const state = { axis: parameters.x in AXES ? parameters.x : "step", smooth: Number(parameters.smooth ?? 0), extra, charts: new Map() };

  const advisory = h("div", { class: "advice" });
  const tiles = h("div", { class: "tiles" });
  const charts = h("div", { class: "charts" });
  const draw = () => {
    drawTiles(tiles, store, context.detail);
    drawCharts(charts, store, state, context);
  };
  const controls = h("div", { class: "bar" },
    h("label", {}, "over", h("select", { "aria-label": "Axis", onchange: (event) => { state.axis = event.target.value; amend({ x: state.axis }); draw(); } },
      Object.entries(AXES).map(([value, [text]]) => h("option", { value, selected: value === state.axis }, text)))),
    h("label", {}, "smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "Smoothing", oninput: (event) => { state.smooth = Number(event.target.value); amend({ smooth: state.smooth || "" }); draw(); } })),
    h("label", {}, "more", h("input", { type: "search", list: "all-metrics", placeholder: "any metric, as lag/p90_s", size: 28, "aria-label": "Add a metric", onchange: async (event) => {
      const name = event.target.value.trim();
      if (!name || !store.all.includes(name)) return;
      event.target.value = "";
      if (!state.extra.includes(name)) state.extra.push(name);
      amend({ metrics: state.extra.join(",") });
      store.add(name);
      await store.update(alive);
      draw();
    } })),
    h("datalist", { id: "all-metrics" }, store.all.map((name) => h("option", { value: name }))));
  drawAdvice(advisory, advice);
  target.append(tiles, advisory, controls, charts);
  context.draw = draw;
  alive.addEventListener("abort", () => state.charts.forEach((chart) => chart.destroy()));
  context.whileLive(1, async () => {
    if (!(await store.update(alive))) return;
    draw();
    drawAdvice(advisory, await ofRun(run, "advice", {}, alive));
  });
  document.addEventListener("run", () => drawTiles(tiles, store, context.detail), { signal: alive });
}

/** Charts measure themselves: they are drawn once they are in the page. */
export function shown(_target, context) {
  context.draw();
}

export function drawAdvice(target, advice) {
  replace(target, advice.map((one) => h("div", { class: `panel ${one.severity}`, role: "status" }, h("b", {}, one.seen), h("div", { class: "change" }, "Change: ", one.change))));
}

function drawTiles(target, store, detail) {
  const { row, summary } = detail;
  const steps = Math.max(row.steps, store.last("policy/version") === null ? 0 : store.last("step") ?? 0);
  const tile = (title, value, about) => value && h("div", { class: "panel tile" }, h("span", {}, title), h("b", {}, value), h("span", {}, about ?? ""));
  const newest = store.values("policy/version").findLastIndex((version) => version !== null);
  const memory = store.matching("memory/*_rss_bytes").reduce((sum, name) => sum + (store.values(name)[newest] ?? 0), 0);
  const heldOut = store.matching("eval/*/reward/mean").map((name) => fixed(store.last(name)));
  const reward = store.last("reward/mean");
  replace(target, [
    tile("Reward", reward !== null && fixed(reward), `from ${fixed(store.first("reward/mean"))}`),
    heldOut.length > 0 && tile("Held out", heldOut.join(" · "), "newest evaluation"),
    tile("Steps", compact(steps), row.max_steps ? `of ${compact(row.max_steps)}` : ""),
    tile("Time", clock(store.last("wall_s") ?? 0)),
    store.last("generation/tokens_per_s") !== null && tile("Generated", compact(store.last("generation/tokens_per_s")), "tokens/s"),
    store.last("staleness/mean") !== null && tile("Staleness", fixed(store.last("staleness/mean"), 2), `at most ${store.last("staleness/max")}`),
    store.last("group/zero_spread_share") !== null && tile("Without spread", percent(store.last("group/zero_spread_share")), "of groups"),
    memory > 0 && tile("Memory", bytes(memory), "all processes"),
    summary && row.reason && tile("Ended", row.state, row.reason),
  ]);
  if (!store.count && row.state === "running") target.append(h("div", { class: "panel tile" }, h("span", {}, "No step yet"), h("b", {}, "…"), h("span", {}, "curves appear as it ends")));
  else if (!store.count) target.append(h("div", { class: "panel tile" }, h("span", {}, "No metrics"), h("b", {}, "–"), h("span", {}, "the run has written none")));
}

function drawCharts(target, store, state, context) {
  const xs = store.xs(state.axis);
  const panels = [...PANELS, ...state.extra.map((name) => ({ id: `metric ${name}`, title: name, unit: "", names: [name] }))];
  for (const panel of panels) {
    const names = namesOf(panel, store);
    let chart = state.charts.get(panel.id);
    if (!names.length) continue;
    if (!chart) {
      chart = new Chart({ ...panel, sync: "run", onPick: (x) => pick(x, store, state, context) });
      state.charts.set(panel.id, chart);
      place(target, chart, panels, panel, state.charts);
    }
    chart.showX = AXES[state.axis][1];
    chart.update(...linesOf(panel, names, xs, store, state));
  }
}

/** In the order of the panels, whenever a metric comes to be. */
function place(target, chart, panels, panel, charts) {
  const after = panels.slice(panels.indexOf(panel) + 1).map((one) => charts.get(one.id)?.element).find(Boolean);
  target.insertBefore(chart.element, after ?? null);
}

function linesOf(panel, names, xs, store, state) {
  const lines = names.map((name) => ({ label: labelOf(name, names, panel), xs, ys: smoothed(store.values(name), state.smooth), points: panel.points }));
  const bands = [];
  if (panel.band) {
    const [mean, spread] = panel.band.map((name) => smoothed(store.values(name), state.smooth));
    if (spread.length) {
      const edge = (sign) => mean.map((value, i) => (value === null || (spread[i] ?? null) === null ? null : value + sign * spread[i]));
      lines.push({ label: "high", xs, ys: edge(1), hidden: true, width: 0, color: undefined }, { label: "low", xs, ys: edge(-1), hidden: true, width: 0 });
      bands.push([lines.length - 2, lines.length - 1, 0]);
    }
  } else if (state.smooth && names.length <= 2) {
    names.forEach((name, index) => lines.push({ label: name, xs, ys: store.values(name), faint: true, color: lines[index].color }));
  }
  return [lines, bands];
}

/** A click on a curve opens the groups of that step. */
function pick(x, store, state, context) {
  const xs = store.xs(state.axis);
  let nearest = 0;
  xs.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(xs[nearest] - x)) nearest = i; });
  const step = store.values("step")[nearest];
  const steps = context.detail.steps;
  if (steps.length) go(context.run, "groups", { step: steps.includes(step) ? step : steps.filter((one) => one <= step).at(-1) ?? steps[0] });
}

