// All runs: a table, and the curves of those that are chosen over each other.
import { Failed, getRuns } from "../api.js";
import { AXES, Chart, seriesColor, smoothed } from "../charts.js";
import { CurveStore } from "../curve_store.js";
import { h, replace, stateBadge } from "../dom.js";
import { ago, clock, compact, fixed, isNumber } from "../format.js";
import { amend, to } from "../places.js";

const CHOSEN_AT_FIRST = 8;
const METRICS = ["reward/mean", "reward/std", "group/zero_spread_share", "rollout/completion_tokens", "training/entropy", "training/kl", "training/grad_norm", "training/effective_sample_share", "staleness/mean", "generation/tokens_per_s"];
const MOST_DIFFERENCES = 5;

export async function show(target, context) {
  const { parameters, alive } = context;
  const state = {
    runs: [], stores: new Map(), metric: parameters.metric ?? "reward/mean", axis: parameters.x in AXES ? parameters.x : "step", smooth: Number(parameters.smooth ?? 0.6), seeds: parameters.seeds === "1",
    chosen: parameters.runs === undefined ? null : new Set(parameters.runs.split(",").filter(Boolean)), sort: parameters.sort ?? "", filter: parameters.filter ?? "",
    isLost: false, // the newest look at them had no answer
  };
  const about = await getRuns(alive);
  const table = h("div", { class: "panel scroll" }), note = h("p", { class: "error", role: "status", hidden: true });
  const chart = new Chart({ title: "Curves of the chosen runs", wide: true, height: 260 });
  alive.addEventListener("abort", () => chart.destroy());
  const redraw = () => drawTable(table, state, choose);
  const choose = async (id, is) => {
    if (is) state.chosen.add(id); else state.chosen.delete(id);
    amend({ runs: [...state.chosen].join(",") });
    redraw();
    await drawChart(chart, state, alive);
  };
  const tell = (lost) => { state.isLost = lost !== ""; note.textContent = lost; note.hidden = !lost; };
  const take = (found) => {
    tell("");
    state.runs = found.runs;
    state.chosen ??= new Set(found.runs.filter((run) => run.steps > 0).slice(0, CHOSEN_AT_FIRST).map((run) => run.id));
    redraw();
  };
  const metricChanged = async (changes) => { Object.assign(state, changes); amend({ metric: state.metric, x: state.axis, smooth: state.smooth, seeds: state.seeds ? "1" : "" }); await drawChart(chart, state, alive); };
  const controls = h("div", { class: "bar" },
    h("input", { type: "search", placeholder: "Filter by name, tag, setting", "aria-label": "Filter runs", value: state.filter, size: 28, oninput: (event) => { state.filter = event.target.value; amend({ filter: state.filter }); redraw(); } }),
    h("label", {}, "metric", h("input", { list: "metrics", value: state.metric, "aria-label": "Metric", size: 26, onchange: (event) => metricChanged({ metric: event.target.value.trim() || "reward/mean" }) }), h("datalist", { id: "metrics" }, METRICS.map((value) => h("option", { value })))),
    h("label", {}, "over", h("select", { "aria-label": "Axis", onchange: (event) => metricChanged({ axis: event.target.value }) }, Object.entries(AXES).map(([value, [text]]) => h("option", { value, selected: value === state.axis }, text)))),
    h("label", {}, "smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "Smoothing", oninput: (event) => metricChanged({ smooth: Number(event.target.value) }) })),
    h("label", {}, h("input", { type: "checkbox", checked: state.seeds, onchange: (event) => metricChanged({ seeds: event.target.checked }) }), "one band for the seeds of a setting"));
  target.append(h("div", { class: "bar" }, h("h1", {}, about.is_one ? "The run" : `Runs in ${about.place}`), h("span", { class: "faint small" }, `tailrace ${about.version}`)), note, controls);
  if (about.runs.length) target.append(h("div", { class: "charts", style: { marginBottom: "12px" } }, chart.element), table);
  else target.append(h("div", { class: "panel empty" }, h("p", {}, `There is no run in ${about.place} yet.`), h("p", {}, h("code", {}, "tailrace train quickstart"), " makes one; it appears here by itself.")));
  take(about);
  context.draw = () => drawChart(chart, state, alive);
  context.every(2, async () => {
    let found;
    try {
      found = await getRuns(alive);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      tell(error.message);
      redraw();
      return;
    }
    if (!about.runs.length && found.runs.length) { location.reload(); return; }
    take(found);
    if (chosenOf(state).some((run) => !isNewest(state.stores.get(run.id), run))) await drawChart(chart, state, alive);
  });
}

export function shown(_target, context) {
  context.draw();
}

/** Those of the chosen that there are: a run's place among them is its colour, in the table and in the chart. */
const chosenOf = (state) => [...state.chosen].map((id) => state.runs.find((run) => run.id === id)).filter(Boolean);

const columns = (varying) => [
  ["run", (run) => run.id], ["state", (run) => run.state], ["reward", (run) => run.reward ?? -Infinity, "num"], ["held out", (run) => run.held_out ?? -Infinity, "num"],
  ["steps", (run) => run.steps, "num"], ["time", (run) => run.wall_s ?? 0, "num"], ["environments", (run) => run.environments.join(", ")], ["changed", (run) => -run.changed_s],
  ...varying.map((name) => [name, (run) => run.differing[name] ?? ""]),
];

function drawTable(target, state, choose) {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => [run.id, run.state, run.model, ...run.environments, ...run.tags, ...Object.entries(run.differing).map(([name, value]) => `${name}=${value}`)].join(" ").toLowerCase();
  let rows = state.runs.filter((run) => words.every((word) => text(run).includes(word)));
  const names = {};
  for (const run of state.runs) for (const name of Object.keys(run.differing)) names[name] = (names[name] ?? 0) + 1;
  const varying = Object.keys(names).slice(0, MOST_DIFFERENCES);
  const all = columns(varying);
  const [sortName, backwards] = [state.sort.replace(/^-/, ""), state.sort.startsWith("-")];
  const by = all.find(([name]) => name === sortName)?.[1];
  if (by) rows = [...rows].sort((a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0) * (backwards ? -1 : 1));
  const tags = state.runs.some((run) => run.tags.length);
  const heading = ([name, , kind]) => h("th", { class: kind, scope: "col", "aria-sort": sortName === name ? (backwards ? "descending" : "ascending") : null },
    h("button", { "data-key": `sort ${name}`, onclick: () => { state.sort = sortName === name && !backwards ? `-${name}` : name; amend({ sort: state.sort }); drawTable(target, state, choose); } }, name, sortName === name ? (backwards ? " ↓" : " ↑") : ""));
  const chosen = chosenOf(state);
  const made = h("div", {}, h("table", {}, h("thead", {}, h("tr", {}, h("th", { "aria-label": "Chosen" }), all.map(heading), tags && h("th", {}, "tags"))),
    h("tbody", {}, rows.map((run) => {
      const place = chosen.indexOf(run);
      return h("tr", {},
        h("td", {}, h("input", { type: "checkbox", checked: place >= 0, "aria-label": `Show the curve of ${run.id}`, onchange: (event) => choose(run.id, event.target.checked) })),
        h("td", {}, place >= 0 && h("i", { class: "swatch", style: { background: seriesColor(place), marginRight: "6px" } }), h("a", { "data-key": `open ${run.id}`, href: to(run.id, "curves") }, run.id)),
        h("td", { title: run.reason }, stateBadge(run.state, state.isLost)),
        h("td", { class: "num" }, fixed(run.reward), isNumber(run.reward_first) && h("span", { class: "faint small" }, ` from ${fixed(run.reward_first, 2)}`)),
        h("td", { class: "num" }, fixed(run.held_out)),
        h("td", { class: "num" }, compact(run.steps), run.max_steps && h("span", { class: "progress", title: `of ${run.max_steps}` }, h("i", { style: { width: `${Math.min(100, (100 * run.steps) / run.max_steps)}%` } }))),
        h("td", { class: "num" }, clock(run.wall_s)),
        h("td", { class: "soft" }, run.environments.join(", ")),
        h("td", { class: "soft" }, ago(run.changed_s)),
        varying.map((name) => h("td", {}, run.differing[name] === undefined ? "" : String(run.differing[name]))),
        tags && h("td", {}, run.tags.map((tag) => h("span", { class: "badge" }, tag))));
    }))), rows.length === 0 && h("div", { class: "empty" }, "No run fits the filter."));
  if (!target.firstChild?.isEqualNode(made)) replace(target, made);
}

/** Whether a curve was asked for since its run changed last. */
const isNewest = (store, run) => store?.changed_s === run.changed_s;

async function drawChart(chart, state, alive) {
  const wanted = chosenOf(state);
  await Promise.all(wanted.map(async (run) => {
    const known = state.stores.get(run.id);
    const store = known?.names.includes(state.metric) ? known : new CurveStore(run.id, [state.metric, "rollout/generated_tokens"]);
    state.stores.set(run.id, store);
    if (!isNewest(store, run)) await store.update(alive).then(() => { store.changed_s = run.changed_s; }, () => {});
  }));
  if (alive.aborted) return;
  chart.showX = AXES[state.axis][1];
  const curves = wanted.map(({ id, family }, index) => {
    const store = state.stores.get(id);
    return { id, family, color: seriesColor(index), ...points(store.xs(state.axis), store.values(state.metric)) };
  }).filter((curve) => curve.xs.length);
  chart.update(...(state.seeds ? bandsOf(curves, state.smooth) : linesOf(curves, state.smooth)));
}

/** Without lines of the file that say nothing of it, and in the order of the axis. */
function points(xs, ys) {
  const places = xs.map((_, i) => i).filter((i) => (ys[i] ?? null) !== null && xs[i] !== null).sort((a, b) => xs[a] - xs[b]);
  return { xs: places.map((i) => xs[i]), ys: places.map((i) => ys[i]) };
}

function linesOf(curves, smooth) {
  const faint = smooth && curves.length <= 4 ? curves.map((curve) => ({ label: curve.id, xs: curve.xs, ys: curve.ys, faint: true, color: curve.color })) : [];
  return [[...faint, ...curves.map((curve) => ({ label: curve.id, xs: curve.xs, ys: smoothed(curve.ys, smooth), color: curve.color }))], []];
}

/** Runs of one family together: their mean, and a band from the lowest to the highest. */
function bandsOf(curves, smooth) {
  const families = new Map();
  for (const curve of curves) families.set(curve.family || curve.id, [...(families.get(curve.family || curve.id) ?? []), curve]);
  const lines = [], bands = [];
  for (const members of families.values()) {
    const color = members[0].color;
    const xs = [...new Set(members.flatMap((curve) => curve.xs))].sort((a, b) => a - b);
    const values = members.map((curve) => interpolated(curve.xs, smoothed(curve.ys, smooth), xs));
    const each = (of) => xs.map((_, i) => { const known = values.map((column) => column[i]).filter((value) => value !== null); return known.length ? of(known) : null; });
    const label = members.length > 1 ? `${members[0].id} and ${members.length - 1} more seeds` : members[0].id;
    lines.push({ label, xs, ys: each((known) => known.reduce((sum, value) => sum + value, 0) / known.length), color });
    if (members.length > 1) {
      const mean = lines.length - 1;
      lines.push({ label: "high", xs, ys: each((known) => Math.max(...known)), color, hidden: true, width: 0 }, { label: "low", xs, ys: each((known) => Math.min(...known)), color, hidden: true, width: 0 });
      bands.push([mean + 1, mean + 2, mean]);
    }
  }
  return [lines, bands];
}

/** A curve at other places of its axis; null outside of it. */
function interpolated(xs, ys, places) {
  let at = 0;
  return places.map((x) => {
    if (!xs.length || x < xs[0] || x > xs.at(-1)) return null;
    while (at < xs.length - 2 && xs[at + 1] < x) at++;
    const next = Math.min(at + 1, xs.length - 1);
    const span = xs[next] - xs[at];
    return span > 0 ? ys[at] + ((ys[next] - ys[at]) * (x - xs[at])) / span : ys[at];
  });
}
