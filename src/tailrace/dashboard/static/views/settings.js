// A run's settings, and what differs from the recipe that they were made of.
import { ofRun } from "../api.js";
import { h, visible } from "../dom.js";

export async function show(target, context) {
  const { run, alive } = context;
  const page = await ofRun(run, "settings", {}, alive);
  const changes = page.changes;
  target.append(
    h("div", { class: "panel scroll", style: { marginBottom: "12px" } }, h("div", { class: "pad" }, h("h3", {}, "Changed from the recipe")),
      changes === null ? h("div", { class: "pad soft" }, "The folder does not say what the recipe was.")
        : changes.length === 0 ? h("div", { class: "pad soft" }, "Nothing: the run has the recipe's settings.")
          : h("table", {}, h("thead", {}, h("tr", {}, ["setting", "recipe", "this run"].map((name) => h("th", {}, name)))), h("tbody", {}, changes.map((change) => h("tr", {}, h("td", { class: "mono" }, visible(change.name)), h("td", { class: "mono soft" }, visible(change.recipe)), h("td", { class: "mono" }, h("b", {}, visible(change.run)))))))),
    h("div", { class: "panel pad" }, h("h3", {}, "All settings (config.toml)"), page.text ? h("pre", { class: "code" }, visible(page.text)) : h("p", { class: "soft" }, "The folder has no settings.")));
}
