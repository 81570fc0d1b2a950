// One group side by side: what went in, what came out, what it was worth.
import { Failed, ofRun } from "../api.js";
import { factsOf, folded, messagesOf } from "../conversation.js";
import { h, isOurs, visible } from "../dom.js";
import { fixed } from "../format.js";
import { groupsOf } from "../grouping.js";
import { go, to } from "../places.js";

const AT_ONCE = 16;

export async function show(target, context) {
  const { run, parameters, alive } = context;
  const kind = parameters.kind || "step", step = Number(parameters.step);
  const table = await ofRun(run, "rollouts", { kind, step }, alive);
  const groups = groupsOf(table.rollouts);
  const at = groups.findIndex((group) => group.id === parameters.id);
  const back = to(run, "groups", { kind: parameters.kind, step });
  if (at < 0) {
    target.append(h("div", { class: "error" }, `step ${step} has no group ${parameters.id}${table.left_out ? ` in the first ${table.rollouts.length} rollouts of its file` : ""}`), h("a", { href: back }, "Groups of the step"));
    return;
  }
  const group = groups[at];
  const shown = group.rollouts.slice(0, AT_ONCE);
  const asked = shown.map((rollout) => ofRun(run, "rollout", { kind, step, id: rollout.rollout_id }, alive).catch(absent));
  const records = (await Promise.all(asked)).filter(Boolean);
  const neighbour = (by) => groups[at + by] && to(run, "group", { kind: parameters.kind, step, id: groups[at + by].id });
  document.addEventListener("keydown", (event) => {
    if (!isOurs(event)) return;
    if (event.key === "ArrowLeft" && neighbour(-1)) location.hash = neighbour(-1);
    if (event.key === "ArrowRight" && neighbour(1)) location.hash = neighbour(1);
    if (event.key === "u") go(run, "groups", { kind: parameters.kind, step });
  }, { signal: alive });
  target.append(
    h("div", { class: "bar" }, h("a", { href: back }, `‹ ${kind} ${step}`), h("h1", {}, visible(group.task)), h("span", { class: "soft" }, visible(group.environment)),
      h("span", {}, `mean ${fixed(group.mean)}`), group.isLeftOut ? h("span", { class: "badge warn" }, "no spread: left out") : group.isFlat && h("span", { class: "badge" }, "no spread"),
      h("span", { class: "spacer" }), neighbour(-1) && h("a", { href: neighbour(-1) }, "← group"), neighbour(1) && h("a", { href: neighbour(1) }, "group →")),
    h("div", { class: "panel pad", style: { marginBottom: "10px" } }, folded("Task, with its ground truth", records[0]?.task) || h("span", { class: "soft" }, "The task's row is empty.")),
    h("div", { class: "side", tabindex: "0", "aria-label": "Rollouts side by side" }, records.map((record) => h("section", { class: "panel pad" },
      h("h3", {}, h("a", { href: to(run, "rollout", { kind: parameters.kind, step, id: record.rollout_id }) }, visible(shortName(record)))),
      factsOf(record), record.error && folded("Error", record.error, true), messagesOf(record, { run, kind, step, id: record.rollout_id })))),
    group.rollouts.length > records.length && h("p", { class: "soft" }, `${group.rollouts.length - records.length} more rollouts are in the step's list.`));
}

/** A rollout that cannot be had leaves its place to the others. */
function absent(error) {
  if (error instanceof Failed) return null;
  throw error;
}

const shortName = (record) => `rollout ${record.rollout_id.startsWith(record.group_id) ? record.rollout_id.slice(record.group_id.length + 1) : record.rollout_id}`;
