// Swim-lanes: what each replica and the trainer did when, where new weights came in, and what every rollout waited for.
import { Failed, ofRun } from "../api.js";
import { alpha, color, h, isOurs, replace, showTip, untraced, visible } from "../dom.js";
import { fixed, seconds } from "../format.js";
import { amend, go } from "../places.js";

const NAMES = { wait_for_batch: "waits for a batch", train: "trains", publish: "publishes weights", checkpoint: "writes a checkpoint", copy_state: "copies its state", form_batch: "forms a batch", send_batch: "sends a batch", score_group: "scores a group", environment: "environment, tools", generate: "generating", score: "scoring" };
const COLORS = { train: "s0", publish: "s3", checkpoint: "s2", copy_state: "s2", form_batch: "s1", send_batch: "s7", score_group: "s6", environment: "s6", generate: "s1", score: "s5" };
const LABELS = 120, TOP = 22, LANE = 30, ROW = 7, MOST_ROWS = 240, LEAST_S = 0.02, SMALL_S = 0.001;
const LAG = ["good", "s6", "s2", "bad"];

export async function show(target, context) {
  const { run, detail, parameters, alive } = context, nothing = untraced(detail);
  if (nothing) { target.append(nothing); return; }
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Schedule: arrow keys move, + and - zoom" });
  const about = h("div", { class: "small soft", "aria-live": "polite" });
  const waiting = h("div", { class: "panel scroll", style: { marginTop: "12px" } });
  const state = { found: null, hits: [], from: parameters.from === undefined ? null : Number(parameters.from), to: parameters.to === undefined ? null : Number(parameters.to) };
  const draw = () => { if (state.found) drawAll(canvas, state); };
  let asked = 0;
  const load = async () => {
    const number = ++asked;
    const found = await ofRun(run, "schedule", { from: state.from, to: state.to }, alive);
    if (number !== asked) return;
    state.found = found;
    draw();
    drawAbout(about, found);
    drawWaiting(waiting, found, context);
  };
  try {
    await load();
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    target.append(h("div", { class: "panel empty" }, error.message));
    return;
  }
  let timer = 0;
  /** What is known is drawn at once; what is missing is asked for once nothing moved for a while. */
  const view = (from, to) => {
    const length = state.found.length_s;
    const wide = Math.min(length, Math.max(LEAST_S, to - from));
    state.from = Math.max(0, Math.min(from, length - wide));
    state.to = state.from + wide;
    state.found = { ...state.found, from_s: state.from, to_s: state.to };
    draw();
    clearTimeout(timer);
    timer = setTimeout(() => { if (alive.aborted) return; amend({ from: state.from.toFixed(3), to: state.to.toFixed(3) }); load().catch(() => {}); }, 120);
  };
  const zoom = (by, at = 0.5) => { const { from_s, to_s } = state.found, middle = from_s + at * (to_s - from_s); view(middle - (middle - from_s) * by, middle + (to_s - middle) * by); };
  const move = (share) => { const { from_s, to_s } = state.found, by = share * (to_s - from_s); view(from_s + by, to_s + by); };
  listen(canvas, state, { zoom, move, view, open: (rollout) => rollout.step >= 0 && go(run, "rollout", { step: rollout.step, id: rollout.rollout_id }) });
  target.append(
    h("div", { class: "bar" }, h("button", { onclick: () => move(-0.5), "aria-label": "Earlier" }, "‹"), h("button", { onclick: () => move(0.5), "aria-label": "Later" }, "›"), h("button", { onclick: () => zoom(0.4), "aria-label": "Zoom in" }, "+"), h("button", { onclick: () => zoom(2.5), "aria-label": "Zoom out" }, "−"), h("button", { onclick: () => view(0, state.found.length_s) }, "whole run"), h("button", { onclick: () => view(state.found.length_s - Math.min(10, state.found.length_s), state.found.length_s) }, "newest"), about),
    legend(), h("div", { class: "panel canvas" }, canvas), waiting);
  context.draw = draw;
  const resizing = new ResizeObserver(draw);
  resizing.observe(canvas.parentElement);
  alive.addEventListener("abort", () => { resizing.disconnect(); clearTimeout(timer); });
  context.whileLive(2, async () => {
    const follows = state.to === null || state.to >= state.found.length_s - 0.5;
    if (state.from !== null && !follows) return;
    if (state.to !== null) { const wide = state.to - state.from; const newest = await ofRun(run, "schedule", {}, alive); state.from = Math.max(0, newest.length_s - wide); state.to = newest.length_s; }
    await load();
  });
}

export const shown = (_target, context) => context.draw?.();

function legend() {
  const item = (name, text) => h("span", {}, h("i", { class: "swatch", style: { background: color(name) } }), ` ${text}`);
  return h("div", { class: "legend", style: { marginBottom: "6px" } }, item("s0", "trains"), item("warn", "waits"), item("s1", "generating"), item("s6", "environment, tools"), item("s5", "scoring"), item("line-strong", "waits for its batch"), item("s3", "new weights"),
    h("span", {}, "replicas by how many versions they are behind: "), ...LAG.map((name, lag) => item(name, lag === 3 ? "3 or more" : String(lag))));
}

function drawAbout(target, found) {
  replace(target, `${seconds(found.to_s - found.from_s)} of ${seconds(found.length_s)}; ${found.num_rollouts} rollouts`, found.rollouts.length || !found.num_rollouts ? "" : " (zoom in to see each)", found.dropped ? `; ${found.dropped} spans are left out: they did not fit the trace (observability.trace_mb), or this page` : "");
}

function drawWaiting(target, found, context) {
  const isLive = context.detail.row.state === "running";
  replace(target, h("div", { class: "pad" }, h("h3", {}, "The oldest in flight"), h("span", { class: "soft small" }, isLive ? "by the newest of the trace; a rollout is known from its first answer on" : "when the trace ended")),
    found.waiting.length ? h("table", {}, h("thead", {}, h("tr", {}, ["rollout", "for", "waits for"].map((name) => h("th", {}, name)))), h("tbody", {}, found.waiting.map((one) => h("tr", {}, h("td", { class: "mono" }, visible(one.rollout_id)), h("td", { class: "num" }, seconds(one.since_s)), h("td", {}, one.waits_for)))))
      : h("div", { class: "pad soft" }, "None."));
}

/** Boxes `{ x, y, w, h, text, rollout? }` under the pointer are kept in `state.hits`. */
function drawAll(canvas, state) {
  const { found } = state;
  const width = canvas.parentElement?.clientWidth ?? 0;
  if (width < 50) return;
  const rows = rowsOf(found.rollouts);
  const height = TOP + found.lanes.length * LANE + Math.min(MOST_ROWS, rows.count) * ROW + 14;
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const span = found.to_s - found.from_s;
  const x = (at) => LABELS + ((at - found.from_s) / span) * (width - LABELS);
  state.hits = [];
  state.x = { left: LABELS, width: width - LABELS };
  pen.save();
  pen.beginPath();
  pen.rect(LABELS, 0, width - LABELS, height);
  pen.clip();
  drawTicks(pen, found, x, height);
  found.lanes.forEach((lane, number) => (lane.kind === "replica" ? drawReplica : drawSpans)(pen, lane, TOP + number * LANE, x, state));
  for (const swap of found.swaps) drawSwap(pen, swap, x(swap.at_s), height, state);
  const top = TOP + found.lanes.length * LANE + 6;
  for (const rollout of found.rollouts) drawRollout(pen, rollout, top + rows.of.get(rollout) * ROW, x, state);
  pen.restore();
  pen.fillStyle = color("soft");
  found.lanes.forEach((lane, number) => pen.fillText(lane.name.slice(0, 18), 10, TOP + number * LANE + LANE / 2));
  if (found.rollouts.length) pen.fillText(`${found.rollouts.length} rollouts`, 10, top + 6);
}

/** As few rows as do not overlap, the oldest on top. */
function rowsOf(rollouts) {
  const ends = [], of = new Map();
  for (const rollout of rollouts) {
    const began = rollout.began_s - rollout.queued_s;
    let row = ends.findIndex((end) => end <= began);
    if (row < 0) row = ends.length < MOST_ROWS ? ends.push(0) - 1 : MOST_ROWS - 1;
    ends[row] = Math.max(rollout.ended_s, rollout.trained_s ?? 0);
    of.set(rollout, row);
  }
  return { count: ends.length, of };
}

function drawTicks(pen, found, x, height) {
  const span = found.to_s - found.from_s;
  const raw = span / 8, power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  for (let at = Math.ceil(found.from_s / tick) * tick; at <= found.to_s; at += tick) {
    pen.fillStyle = color("line");
    pen.fillRect(x(at), TOP - 4, 1, height);
    pen.fillStyle = color("faint");
    pen.fillText(tick >= 1 ? `${Math.round(at)} s` : `${at.toFixed(Math.max(0, -Math.floor(Math.log10(tick))))} s`, x(at) + 3, 10);
  }
}

function box(pen, state, left, top, right, height, fill, text, more) {
  const wide = Math.max(0.6, right - left);
  pen.fillStyle = fill;
  pen.fillRect(left, top, wide, height);
  state.hits.push({ x: left, y: top, w: Math.max(3, wide), h: height, text, ...more });
}

function drawSpans(pen, lane, top, x, state) {
  for (const [name, began, ended, number] of lane.spans) {
    const waits = name === "wait_for_batch";
    const about = `${NAMES[name] ?? name}${number >= 0 ? ` (${name === "publish" ? "version" : "step"} ${number})` : ""}: ${seconds(ended - began)}`;
    box(pen, state, x(began), top + (name === "publish" ? 20 : 4), x(ended), name === "publish" ? 5 : waits ? 8 : 15, waits ? alpha(color("warn"), 0.55) : color(COLORS[name] ?? "s0"), `${lane.name}: ${about}`);
    if (name === "train" && x(ended) - x(began) > 26) {
      pen.fillStyle = color("back");
      pen.fillText(String(number), Math.max(x(began) + 4, LABELS + 3), top + 12);
    }
  }
}

/** How many requests a replica has, in the colour of how old its weights are. */
function drawReplica(pen, lane, top, x, state) {
  const { found } = state;
  const most = Math.max(1, ...lane.busy), part = (found.to_s - found.from_s) / lane.busy.length;
  let change = 0;
  lane.busy.forEach((count, i) => {
    const at = found.from_s + (i + 0.5) * part;
    while (change + 1 < lane.lag.length && lane.lag[change + 1][0] <= at) change++;
    const lag = lane.lag[change]?.[1] ?? 0;
    const high = (count / most) * (LANE - 8);
    const left = x(found.from_s + i * part), right = x(found.from_s + (i + 1) * part);
    pen.fillStyle = alpha(color(LAG[Math.min(3, lag)]), 0.75);
    pen.fillRect(left, top + LANE - 4 - high, right - left + 0.5, high);
    state.hits.push({ x: left, y: top, w: right - left, h: LANE, text: `${lane.name}: ${count} requests in flight${count ? "" : " (idle)"}\nits weights are ${lag ? `${lag} versions behind` : "the newest"}` });
  });
}

function drawSwap(pen, swap, at, height, state) {
  pen.fillStyle = alpha(color("s3"), 0.55);
  pen.fillRect(at, TOP - 4, 1, height);
  state.hits.push({ x: at - 2, y: TOP - 4, w: 5, h: 12, text: `version ${swap.version} in use${swap.replica ? ` on ${swap.replica}` : ""}` });
}

function drawRollout(pen, rollout, top, x, state) {
  const parts = rollout.parts.reduce((sum, [name, began, ended]) => ({ ...sum, [name]: (sum[name] ?? 0) + ended - began }), {});
  if (parts.environment) parts.environment = Math.max(0, parts.environment - (parts.generate ?? 0));
  const waits = rollout.trained_s === null ? 0 : Math.max(0, rollout.trained_s - rollout.ended_s);
  const text = [rollout.rollout_id, `reward ${fixed(rollout.reward)} · ${rollout.outcome || "not in a step's file"}${rollout.step >= 0 ? ` · step ${rollout.step}` : ""}`,
    [["queued", rollout.queued_s], ...Object.entries(parts).map(([name, took]) => [NAMES[name] ?? name, took]), ["waits for its batch", waits]].filter(([, took]) => took > SMALL_S).map(([name, took]) => `${name} ${seconds(took)}`).join(" · "),
    rollout.staleness === null ? "" : `its tokens were ${fixed(rollout.staleness, 1)} versions old when trained`].filter(Boolean).join("\n");
  const high = ROW - 2;
  const hit = { rollout };
  if (rollout.queued_s > SMALL_S) box(pen, state, x(rollout.began_s - rollout.queued_s), top + 2, x(rollout.began_s), high - 3, color("line-strong"), text, hit);
  box(pen, state, x(rollout.began_s), top, x(rollout.ended_s), high, alpha(color("s6"), 0.7), text, hit);
  for (const [name, began, ended] of rollout.parts) if (name !== "environment") { pen.fillStyle = color(COLORS[name] ?? "s1"); pen.fillRect(x(began), top, Math.max(0.6, x(ended) - x(began)), high); }
  if (rollout.trained_s !== null) {
    box(pen, state, x(rollout.ended_s), top + 1.5, x(rollout.trained_s), high - 3, alpha(color("line-strong"), 0.9), text, hit);
    pen.fillStyle = rollout.staleness === null ? color("s0") : color(LAG[Math.min(3, Math.round(rollout.staleness))]);
    pen.fillRect(x(rollout.trained_s) - 1, top, 3, high);
  }
}

function listen(canvas, state, { zoom, move, view, open }) {
  const at = (event) => { const place = canvas.getBoundingClientRect(); return [event.clientX - place.left, event.clientY - place.top]; };
  const hit = (event) => { const [px, py] = at(event); return state.hits.findLast((one) => px >= one.x - 1 && px <= one.x + one.w + 1 && py >= one.y - 1 && py <= one.y + one.h + 1); };
  const share = (event) => Math.max(0, (at(event)[0] - state.x.left) / state.x.width);
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: state.found.from_s, to: state.found.to_s, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { showTip(visible(hit(event)?.text ?? ""), event.clientX, event.clientY); return; }
    const by = ((drag.x - event.clientX) / state.x.width) * (drag.to - drag.from);
    if (Math.abs(event.clientX - drag.x) > 3) { drag.moved = true; showTip(""); view(drag.from + by, drag.to + by); }
  });
  canvas.addEventListener("pointerup", (event) => { const was = drag; drag = null; const found = hit(event); if (!was?.moved && found?.rollout) open(found.rollout); });
  canvas.addEventListener("pointerleave", () => showTip(""));
  canvas.addEventListener("dblclick", (event) => zoom(0.3, share(event)));
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, share(event)); } else if (event.deltaX) { event.preventDefault(); move(event.deltaX / 800); } }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (!isOurs(event)) return;
    const act = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
}
