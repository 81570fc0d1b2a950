// One rollout: its conversation, and all that is known of it.
import { ofRun } from "../api.js";
import { factsOf, folded, messagesOf } from "../conversation.js";
import { h, isOurs, visible } from "../dom.js";
import { fixed, isNumber, short } from "../format.js";
import { go, to } from "../places.js";

export async function show(target, context) {
  const { run, detail, parameters, alive } = context;
  const kind = parameters.kind || "step", step = Number(parameters.step);
  const [record, table] = await Promise.all([ofRun(run, "rollout", { kind, step, id: parameters.id }, alive), ofRun(run, "rollouts", { kind, step }, alive)]);
  const siblings = table.rollouts.filter((rollout) => rollout.group_id === record.group_id);
  const at = siblings.findIndex((rollout) => rollout.rollout_id === record.rollout_id);
  const place = (rollout) => to(run, "rollout", { kind: parameters.kind, step, id: rollout.rollout_id });
  const group = { kind: parameters.kind, step, id: record.group_id };
  document.addEventListener("keydown", (event) => {
    if (!isOurs(event)) return;
    if (event.key === "ArrowLeft" && siblings[at - 1]) location.hash = place(siblings[at - 1]);
    if (event.key === "ArrowRight" && siblings[at + 1]) location.hash = place(siblings[at + 1]);
    if (event.key === "u") go(run, "group", group);
  }, { signal: alive });
  const hasTokens = (kind === "evaluation" ? detail.tokens?.evaluations : detail.tokens?.steps)?.includes(step);
  target.append(
    h("div", { class: "bar" }, h("a", { href: to(run, "groups", { kind: parameters.kind, step }) }, `‹ ${kind} ${step}`), h("a", { href: to(run, "group", group) }, visible(record.task_id)), h("h1", {}, visible(record.rollout_id)),
      hasTokens && h("a", { href: to(run, "tokens", { kind: parameters.kind, step, id: record.rollout_id }) }, "Tokens ›")),
    h("div", { class: "bar", role: "group", "aria-label": "Rollouts of the group" }, siblings.map((rollout, number) => h("a", { class: `badge ${number === at ? "here" : ""}`, href: place(rollout), "aria-current": number === at ? "true" : null }, `${number + 1}: ${fixed(rollout.reward, 2)}`))),
    h("div", { class: "split" },
      h("div", { class: "panel pad" }, record.error && h("div", { class: "error" }, visible(textOf(record.error))), messagesOf(record, { run, kind, step, id: record.rollout_id })),
      h("aside", { class: "panel pad" }, factsOf(record),
        folded("Task, with its ground truth", record.task, true), folded("What the environment saved", record.columns), folded("Metadata", record.metadata),
        folded("Times and counts", Object.fromEntries(Object.entries(record.metrics ?? {}).map(([name, value]) => [name, isNumber(value) ? short(value) : value]))), folded("Sampling", record.sampling))));
}

const textOf = (value) => (typeof value === "string" ? value : value.cut);
