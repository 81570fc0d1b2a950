// The frame around the views of a report: the dashboard's own, in the place of the report while the address names one.
import { about } from "./report_api.js";
import { h, replace } from "./dom.js";
import { here } from "./places.js";
import * as group from "./views/group.js";
import * as rollout from "./views/rollout.js";
import * as tokens from "./views/tokens.js";

const VIEWS = { group, rollout, tokens };
const part = (id) => document.getElementById(id);

let leaving = new AbortController();
let scrolled = 0;

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const alive = leaving.signal, place = here();
  const module = place.run === undefined ? undefined : VIEWS[place.view];
  if (!part("report").hidden) scrolled = scrollY;
  part("report").hidden = module !== undefined;
  part("views").hidden = module === undefined;
  part("report-style").media = module === undefined ? "all" : "not all";
  part("views-style").media = module === undefined ? "not all" : "all";
  if (module === undefined) {
    replace(part("main"));
    scrollTo(0, scrolled);
    return;
  }
  const target = h("div", { class: "view", "data-view": place.view });
  const context = { run: place.run, detail: about, parameters: place.parameters, alive, every: () => {} };
  try {
    await module.show(target, context);
  } catch (error) {
    if (alive.aborted) return;
    replace(target, h("div", { class: "error", role: "alert" }, error.message));
  }
  if (alive.aborted) return;
  replace(part("main"), target);
  module.shown?.(target, context);
  target.dataset.ready = "yes";
  scrollTo(0, 0);
}

addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
