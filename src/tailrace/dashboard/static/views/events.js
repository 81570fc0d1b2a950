// What happened: the run's own events, and what its processes warned of.
import { ofRun } from "../api.js";
import { h, replace, stateClass, visible } from "../dom.js";

const CLASSES = { warning: "warn", error: "bad", StepSkipped: "warn", StopRequested: "warn" };
const classOf = ({ kind, status }) => (kind === "TrainerEnded" ? stateClass(status) : CLASSES[kind] ?? "");

export async function show(target, context) {
  const { run, alive } = context;
  const body = h("tbody", {});
  const draw = (events) => replace(body, events.map((event) => h("tr", {},
    h("td", { class: "soft small" }, event.at || (event.step !== null ? `step ${event.step}` : "")), h("td", {}, h("span", { class: `badge ${classOf(event)}` }, event.kind)),
    h("td", { class: "soft" }, event.role), h("td", { style: { whiteSpace: "pre-wrap", overflowWrap: "anywhere" } }, visible(event.text)))),
    events.length === 0 && h("tr", {}, h("td", {}, h("span", { class: "soft" }, "Nothing was logged yet."))));
  draw(await ofRun(run, "events", {}, alive));
  target.append(h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["when", "what", "who", ""].map((name) => h("th", {}, name)))), body)));
  context.whileLive(2, async () => draw(await ofRun(run, "events", {}, alive)));
}
