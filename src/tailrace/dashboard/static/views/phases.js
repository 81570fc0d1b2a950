// A step's phases as a waterfall: who worked when, and what everybody waited for.
import { ofRun, Failed } from "../api.js";
import { color, h, isOurs, replace, showTip, typing, untraced } from "../dom.js";
import { seconds } from "../format.js";
import { amend } from "../places.js";

const NAMES = { wait_for_batch: "trainer waits for a batch", train: "train", gradients: "gradients", optimizer: "optimizer", publish: "publish weights", form_batch: "form batch", send_batch: "send batch", load_model_state_dict: "load weights", change_weights: "swap weights", copy_state: "copy state", checkpoint: "write checkpoint", "requests in flight": "generating" };
const COLORS = { train: "s0", gradients: "s4", optimizer: "s6", publish: "s3", form_batch: "s1", send_batch: "s7", load_model_state_dict: "s3", change_weights: "s5", copy_state: "s2", checkpoint: "s2", "requests in flight": "s1" };

export async function show(target, context) {
  const { run, detail, parameters, alive } = context, nothing = untraced(detail);
  if (nothing) { target.append(nothing); return; }
  const place = h("div", {}), isTyped = typing(target);
  let found = null, chosen = parameters.step; // without one, the newest
  const load = async (step) => {
    let answer;
    chosen = step;
    try {
      answer = await ofRun(run, "waterfall", { step }, alive);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      replace(place, h("div", { class: "panel empty" }, error.message));
      return;
    }
    if (chosen !== step || (step === undefined && isTyped())) return; // another one was chosen meanwhile, or is about to be
    found = answer;
    if (step !== undefined) amend({ step: found.step });
    draw(place, found, (to) => load(to));
  };
  await load(chosen);
  target.append(place);
  document.addEventListener("keydown", (event) => {
    if (!isOurs(event) || !found) return;
    const at = found.steps.indexOf(found.step);
    const next = event.key === "[" ? found.steps[at - 1] : event.key === "]" ? found.steps[at + 1] : undefined;
    if (next !== undefined) load(next);
  }, { signal: alive });
  context.whileLive(2, async () => { if (chosen === undefined) await load(undefined); });
}

function draw(target, found, load) {
  const lanes = new Map();
  for (const bar of found.bars) lanes.set(bar.lane, [...(lanes.get(bar.lane) ?? []), bar]);
  const at = found.steps.indexOf(found.step);
  const input = h("input", { type: "number", value: found.step, min: found.steps[0], max: found.steps.at(-1), "aria-label": "Step", onchange: () => load(Number(input.value)) });
  const gaps = {};
  for (const bar of found.bars) {
    const name = bar.name === "wait_for_batch" ? NAMES.wait_for_batch : bar.is_gap ? (bar.name.includes(bar.lane) ? bar.name : `${bar.lane}: ${bar.name}`) : null;
    if (name) gaps[name] = (gaps[name] ?? 0) + bar.ended_s - bar.began_s;
  }
  const worst = Object.entries(gaps).sort((a, b) => b[1] - a[1]).filter(([, length]) => length > 0.001);
  replace(target,
    h("div", { class: "bar" }, h("span", { class: "soft" }, "step"), h("button", { disabled: at <= 0, onclick: () => load(found.steps[at - 1]), "aria-label": "Step before", title: "[" }, "‹"), input, h("button", { disabled: at >= found.steps.length - 1, onclick: () => load(found.steps[at + 1]), "aria-label": "Step after", title: "]" }, "›"),
      h("b", {}, seconds(found.length_s)), h("span", { class: "soft" }, `beginning ${seconds(found.began_s)} into the trace`)),
    h("div", { class: "panel waterfall" }, [...lanes].map(([lane, bars]) => h("div", { class: "lane" }, h("span", { title: lane }, lane), track(bars, found.length_s)))),
    h("div", { class: "axis", style: { padding: "4px 2px 12px 130px" } }, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", {}, seconds(share * found.length_s)))),
    h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "waiting"), h("th", { class: "num" }, "time"), h("th", { class: "num" }, "of the step"))),
      h("tbody", {}, worst.length ? worst.map(([name, length]) => h("tr", {}, h("td", {}, name), h("td", { class: "num" }, seconds(length)), h("td", { class: "num" }, `${Math.round((100 * length) / found.length_s)} %`))) : h("tr", {}, h("td", {}, "Nobody waited."))))));
}

function track(bars, length) {
  const rows = 1 + Math.max(...bars.map((bar) => bar.depth));
  return h("div", { class: "track", style: { height: `${rows * 24 + 4}px` } }, bars.filter((bar) => bar.ended_s >= bar.began_s).map((bar) => {
    const isGap = bar.is_gap || bar.name === "wait_for_batch";
    const name = NAMES[bar.name] ?? bar.name, took = bar.ended_s - bar.began_s;
    const share = (100 * took) / length;
    const text = `${name}: ${seconds(took)}`;
    return h("div", { class: `phase${isGap ? " gap" : ""}`, "aria-label": text, role: "img", style: { left: `${(100 * bar.began_s) / length}%`, width: `${Math.max(share, 0.1)}%`, top: `${4 + bar.depth * 24}px`, background: isGap ? "" : color(COLORS[bar.name] ?? "s0") },
      onpointermove: (event) => showTip(text, event.clientX, event.clientY), onpointerleave: () => showTip("") }, share > 4 ? name : "");
  }));
}
