// The frame around the views: which one is shown, its tabs, the colours, the keys.
import { Failed, getRuns, ofRun, every } from "./api.js";
import { h, isLive, isOurs, replace, showTip, stateBadge } from "./dom.js";
import { here, to, go } from "./places.js";

const VIEWS = {
  runs: () => import("./views/runs.js"),
  curves: () => import("./views/curves.js"),
  phases: () => import("./views/phases.js"),
  schedule: () => import("./views/schedule.js"),
  groups: () => import("./views/groups.js"),
  group: () => import("./views/group.js"),
  rollout: () => import("./views/rollout.js"),
  tokens: () => import("./views/tokens.js"),
  events: () => import("./views/events.js"),
  settings: () => import("./views/settings.js"),
  chat: () => import("./views/chat.js"),
};
const TABS = [["curves", "Curves"], ["groups", "Groups"], ["schedule", "Schedule"], ["phases", "Phases"], ["events", "Events"], ["settings", "Settings"], ["chat", "Try it"]];
const ABOVE = { group: "groups", rollout: "groups", tokens: "groups" };

const LIVE_S = 2, QUIET_S = 20;

let leaving = new AbortController();
let repaint = show; // in other colours

function header(place) {
  const tab = ABOVE[place.view] ?? place.view;
  const step = place.parameters.step;
  replace(document.getElementById("top"),
    h("a", { class: "brand", href: to(), title: "All runs" }, h("img", { src: "icon.svg", alt: "" }), "tailrace"),
    place.run !== undefined && h("span", { class: "crumb", title: place.run }, place.run),
    place.run !== undefined && h("span", { id: "state" }),
    place.run !== undefined && h("nav", { "aria-label": "Views of the run" }, TABS.map(([view, title]) =>
      h("a", { href: to(place.run, view, view === "groups" || view === "phases" ? { step, kind: place.parameters.kind } : {}), "aria-current": tab === view ? "page" : null }, title))),
    h("span", { class: "spacer" }),
    h("button", { class: "plain", onclick: help, title: "Keys", "aria-label": "Keys" }, "?"),
    h("button", { class: "plain", onclick: toggleTheme, title: "Light or dark", "aria-label": "Light or dark" }, "◐"));
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("tailrace-theme", root.dataset.theme);
  repaint();
}

function help() {
  const keys = [["g r", "all runs"], ["1 – 7", "a run's views"], ["[ and ]", "the step before and after"], ["← and →", "the rollout, group or token before and after"], ["/", "search"], ["u", "up: from tokens to rollout, group, step"], ["Esc", "close"]];
  const dialog = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, keys.map(([key, text]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text))))), h("button", { autofocus: true, onclick: () => dialog.close() }, "Close"));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

async function show() {
  const place = here();
  leaving.abort();
  leaving = new AbortController();
  const alive = leaving.signal;
  repaint = show;
  showTip("");
  document.querySelector(".view")?.removeAttribute("data-ready");
  const main = document.getElementById("main");
  document.title = place.run === undefined ? "Tailrace" : `${place.run} · ${place.view} · Tailrace`;
  header(place);
  const load = VIEWS[place.view];
  const target = h("div", { class: "view", "data-view": place.view });
  try {
    if (!load) throw new Error(`there is no view ${place.view}`);
    const [module, detail] = await Promise.all([load(), place.run === undefined ? null : ofRun(place.run, "", {}, alive)]);
    if (alive.aborted) return;
    const note = h("p", { role: "status", style: { overflowWrap: "anywhere" } });
    if (detail) tell(detail, note);
    const context = { run: place.run, detail, parameters: place.parameters, alive, every: (seconds, call) => every(seconds, alive, call), whileLive: (seconds, call) => whileLive(seconds, detail, alive, call) };
    await module.show(target, context);
    if (alive.aborted) return;
    replace(main, detail && note, target);
    module.shown?.(target, context);
    if (module.repaint) repaint = () => module.repaint(context);
    target.dataset.ready = "yes";
    if (detail) {
      const follow = async (live) => { if (isLive(detail.row.state) === live) await ask(place, detail, note, alive); };
      every(LIVE_S, alive, () => follow(true));
      every(QUIET_S, alive, () => follow(false)); // it may be resumed
    }
  } catch (error) {
    if (error.name === "AbortError" || alive.aborted) return;
    replace(main, h("div", { class: "error", role: "alert" }, error.message), h("a", { href: to() }, "All runs"));
    if (error.constructor.name !== "Failed") console.error(error);
  }
}

async function ask(place, detail, note, alive) {
  try {
    Object.assign(detail, await ofRun(place.run, "", {}, alive));
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    tell(detail, note, error.message);
    return;
  }
  tell(detail, note);
  document.dispatchEvent(new CustomEvent("run", { detail }));
}

/** `lost` says why there was no answer, until there is one. */
function tell(detail, note, lost = "") {
  replace(document.getElementById("state"), stateBadge(detail.row.state, lost !== ""));
  note.textContent = lost || detail.note;
  note.className = lost ? "error" : "soft small";
  note.hidden = !note.textContent;
}

/** Calls again and again while the run goes on, and once after its end. */
function whileLive(seconds, detail, alive, call) {
  let was = isLive(detail.row.state);
  every(seconds, alive, async () => {
    const is = isLive(detail.row.state);
    if (is || was) await call();
    was = is;
  });
}

let before = "";
document.addEventListener("keydown", (event) => {
  if (!isOurs(event)) return;
  const place = here();
  if (event.key === "?") help();
  else if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  } else if (before === "g" && event.key === "r") location.hash = to();
  else if (place.run !== undefined && /^[1-7]$/.test(event.key)) go(place.run, TABS[Number(event.key) - 1][0]);
  before = event.key;
});

addEventListener("hashchange", () => show());
addEventListener("again", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint());

// One run alone: there is nothing to choose from.
if (!location.hash) {
  const runs = await getRuns().catch(() => null);
  if (runs?.is_one && runs.runs.length === 1) history.replaceState(null, "", to(runs.runs[0].id, "curves"));
}
show();
