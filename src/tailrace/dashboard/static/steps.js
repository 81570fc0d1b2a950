// Which step one looks at: of training, or of an evaluation. Keys [ and ] go to the one before and after.
import { h, isOurs } from "./dom.js";

export function stepPicker(detail, kind, step, alive, choose) {
  const list = kind === "evaluation" ? detail.evaluations : detail.steps;
  const at = list.indexOf(step);
  const move = (by) => { const next = list[(at < 0 ? list.length - 1 : at) + by]; if (next !== undefined) choose(kind, next); };
  document.addEventListener("keydown", (event) => {
    if (!isOurs(event)) return;
    if (event.key === "[") move(-1);
    if (event.key === "]") move(1);
  }, { signal: alive });
  const input = h("input", { type: "number", value: step, min: list[0], max: list.at(-1), "aria-label": "Step", onchange: () => {
    const wanted = Number(input.value);
    choose(kind, list.includes(wanted) ? wanted : list.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), list[0]));
  } });
  return h("div", { class: "bar", style: { marginBottom: "0" } },
    detail.evaluations.length > 0 && h("select", { "aria-label": "Training or evaluation", onchange: (event) => choose(event.target.value, (event.target.value === "evaluation" ? detail.evaluations : detail.steps).at(-1)) },
      [["step", "training step"], ["evaluation", "evaluation"]].map(([value, text]) => h("option", { value, selected: value === kind }, text))),
    detail.evaluations.length === 0 && h("span", { class: "soft" }, "step"),
    h("button", { onclick: () => move(-1), disabled: at <= 0, "aria-label": "Step before", title: "[" }, "‹"), input,
    h("button", { onclick: () => move(1), disabled: at < 0 || at >= list.length - 1, "aria-label": "Step after", title: "]" }, "›"),
    h("input", { type: "range", min: 0, max: Math.max(0, list.length - 1), value: Math.max(0, at), "aria-label": "Steps", style: { width: "180px" }, onchange: (event) => choose(kind, list[Number(event.target.value)]) }),
    h("span", { class: "faint small" }, `of ${list.length}`));
}

/** What the address says, else the newest. */
export function chosenStep(detail, parameters) {
  const kind = parameters.kind === "evaluation" || (!detail.steps.length && detail.evaluations.length) ? "evaluation" : "step";
  const list = kind === "evaluation" ? detail.evaluations : detail.steps;
  return { kind, step: parameters.step !== undefined && Number.isFinite(Number(parameters.step)) ? Number(parameters.step) : list.at(-1) };
}
