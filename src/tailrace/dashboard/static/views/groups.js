// A step's groups as strips of rewards: what can be learnt from, what teaches nothing, what failed.
import { ofRun } from "../api.js";
import { outcomeText } from "../conversation.js";
import { alpha, color, h, replace, showTip, typing, visible } from "../dom.js";
import { compact, fixed, isNumber } from "../format.js";
import { changesSince, groupsOf, histogram, passes, SORTS } from "../grouping.js";
import { amend, go, to } from "../places.js";
import { chosenStep, stepPicker } from "../steps.js";

export async function show(target, context) {
  const { run, detail, parameters, alive } = context, taken = takenIn(detail); // before what it tells of is asked for
  if (!detail.steps.length && !detail.evaluations.length) {
    target.append(h("div", { class: "panel empty" }, detail.row.state === "running" ? "No step has ended yet: its groups appear here." : "This run has no rollouts (observability.rollouts_every_steps is 0, or none ended)."));
    document.addEventListener("run", () => { if (detail.steps.length || detail.evaluations.length) again(); }, { signal: alive });
    return;
  }
  const { kind, step } = chosenStep(detail, parameters);
  const found = await ofRun(run, "rollouts", { kind, step }, alive);
  const filter = { text: parameters.text, environment: parameters.environment, outcome: parameters.outcome, reward: parameters.reward, length: parameters.length };
  const state = { run, kind, step, rollouts: found.rollouts, groups: groupsOf(found.rollouts), filter, sort: parameters.sort in SORTS ? parameters.sort : "file", since: parameters.since, holds: null, rounds: 0 };

  const list = h("div", { class: "strips" }), isTyped = typing(target);
  const bins = h("div", { class: "histogram", role: "group", "aria-label": "Rewards of the step" });
  const about = h("div", { class: "small soft" });
  const axis = h("div", { class: "axis" });
  const matches = h("div", {});
  const draw = () => { drawStrips(list, state); drawHistogram(bins, axis, state, set); drawAbout(about, state); };
  const set = (changes) => { Object.assign(state.filter, changes); amend(state.filter); search(); };

  const environments = [...new Set(found.rollouts.map((rollout) => rollout.environment))];
  const outcomes = [...new Set(found.rollouts.flatMap((rollout) => [rollout.outcome.state, rollout.outcome.reason]).filter(Boolean))];
  /** In all files where a text is asked for, or `rounds` above 0: as often as it went on, which the address keeps. */
  const search = async (rounds = 0) => {
    const wanted = { ...state.filter, text: state.filter.text?.trim() }, asked = (state.asked = { ...wanted, kind, step });
    wentOn(Object.values(wanted).some(Boolean) ? rounds : 0);
    let answer = asked.text || state.rounds ? await ofRun(run, "search", asked, alive) : null;
    for (let round = 1; round < rounds && answer?.left > 0 && state.asked === asked; round++) answer = await goneOn(answer, asked);
    if (state.asked !== asked) return; // the filters have changed since
    const here = answer?.matches.filter((match) => match.kind === kind && match.step === step).map((match) => match.rollout_id);
    state.holds = asked.text ? new Set(here) : null;
    replace(matches);
    if (answer) showMatches(answer, asked, here.length);
    draw();
  };
  const wentOn = (rounds) => { state.rounds = rounds; amend({ rounds: rounds || "" }); };
  const goneOn = async (answer, asked) => {
    const more = await ofRun(run, "search", { ...asked, from: answer.next }, alive);
    return { ...more, matches: [...answer.matches, ...more.matches], left_out: answer.left_out + more.left_out };
  };
  const showMatches = (answer, asked, numHere) => drawMatches(matches, answer, state, numHere, async () => {
    const more = await goneOn(answer, asked);
    if (state.asked !== asked) return;
    wentOn(Math.max(1, state.rounds) + 1);
    showMatches(more, asked, numHere);
  });
  const select = (label, name, values) => values.length > 1 && h("select", { "aria-label": label, onchange: (event) => set({ [name]: event.target.value }) },
    h("option", { value: "" }, `all ${label}s`), values.map((value) => h("option", { value, selected: value === filter[name] }, value)));
  const sortBy = async (name) => {
    state.sort = name;
    amend({ sort: name === "file" ? "" : name });
    if (name === "change" && !state.before) await compare();
    draw();
  };
  const compare = async () => {
    const files = (kind === "evaluation" ? detail.evaluations : detail.steps).filter((one) => one < step);
    state.since = state.since === undefined ? files.at(-1) : Number(state.since);
    if (state.since === undefined) return;
    state.before = groupsOf((await ofRun(run, "rollouts", { kind, step: state.since }, alive)).rollouts);
    changesSince(state.groups, state.before);
    const since = document.querySelector("input[aria-label='Compared with step']");
    if (since) since.value = state.since;
  };

  target.append(
    h("div", { class: "bar" }, stepPicker(detail, kind, step, alive, (newKind, newStep) => go(run, "groups", { ...parameters, kind: newKind === "step" ? "" : newKind, step: newStep, since: "", rounds: "" })), detail.row.state === "running" && kind === "step" && h("button", { onclick: () => go(run, "groups", { ...parameters, step: "", rounds: "" }) }, "newest")),
    h("div", { class: "bar" },
      h("input", { type: "search", placeholder: "Search texts and tasks", "aria-label": "Search texts and tasks", value: filter.text ?? "", size: 26, onchange: (event) => set({ text: event.target.value }) }),
      select("environment", "environment", environments), select("outcome", "outcome", outcomes),
      h("label", {}, "reward", h("input", { value: filter.reward ?? "", placeholder: "0.5..1", size: 8, "aria-label": "Range of reward", onchange: (event) => set({ reward: event.target.value }) })),
      h("label", {}, "length", h("input", { value: filter.length ?? "", placeholder: "..200", size: 8, "aria-label": "Range of length", onchange: (event) => set({ length: event.target.value }) })),
      h("label", {}, "sort", h("select", { "aria-label": "Sort groups", onchange: (event) => sortBy(event.target.value) }, Object.entries(SORTS).map(([value, [text]]) => h("option", { value, selected: value === state.sort }, text)))),
      h("label", { title: "For `what changed most`: the other step" }, "since", h("input", { type: "number", value: state.since ?? "", "aria-label": "Compared with step", onchange: async (event) => { state.since = event.target.value; state.before = null; amend({ since: state.since }); await compare(); await sortBy("change"); } })),
      h("button", { onclick: () => search(1), title: "The same filters, in all files of the run" }, "in all steps")),
    found.left_out > 0 && h("p", { class: "soft" }, `The file has ${compact(found.rollouts.length + found.left_out)} rollouts. Groups, counts and searches are of the first ${compact(found.rollouts.length)}.`),
    h("div", { class: "split" }, h("div", {}, matches, h("div", { class: "panel pad" }, list)), h("aside", { class: "panel pad" }, h("h3", {}, "Rewards"), bins, axis, about)));
  draw();
  document.addEventListener("run", () => {
    const isOther = parameters.step === undefined && kind === "step" && detail.steps.at(-1) !== step;
    const tookInMore = detail.row.state === "read" && takenIn(detail) !== taken;
    if ((isOther || tookInMore) && !isTyped()) again();
  }, { signal: alive });
  // Last: in all files of a long run a search takes seconds.
  if (filter.text || parameters.rounds) await search(Number(parameters.rounds) || 0);
  if (state.sort === "change") { await compare(); draw(); }
}

const again = () => dispatchEvent(new CustomEvent("again"));

const takenIn = ({ note, row }) => `${note} ${row.changed_s}`; // of another library's file: how far, and of which moment

function rewardColor(reward, low, high) {
  const share = high > low ? (reward - low) / (high - low) : 0.5;
  return alpha(color("s0"), 0.08 + 0.82 * share);
}

function drawStrips(target, state) {
  const { low, high } = histogram(state.rollouts);
  const order = SORTS[state.sort][1];
  const groups = order ? [...state.groups].sort(order) : state.groups;
  const shown = groups.filter((group) => group.rollouts.some((rollout) => passes(rollout, state.filter, state.holds)));
  const place = (id) => to(state.run, "group", { kind: state.kind === "step" ? "" : state.kind, step: state.step, id });
  replace(target, shown.map((group) => h("a", { class: "strip", href: place(group.id) },
    h("span", { class: "name", title: group.task }, visible(group.task), h("span", { class: "faint small" }, ` ${visible(group.environment)}`)),
    h("span", { class: "cells" }, group.rollouts.map((rollout) => cellOf(rollout, state, low, high))),
    h("span", { class: "small soft" }, state.sort === "change" && isNumber(group.change) && h("span", { class: `badge ${group.change < 0 ? "bad" : "good"}` }, `${group.change > 0 ? "+" : ""}${fixed(group.change, 2)} since ${state.since}`), " ",
      group.isLeftOut ? h("span", { class: "badge warn", title: "Left out, since all rewards are equal and nothing else teaches" }, "no spread") : group.isFlat && h("span", { class: "badge", title: "All rewards are equal" }, "no spread"), ` ${fixed(group.mean, 2)}`, group.spread > 0 && h("span", { class: "faint" }, ` (${fixed(group.low, 2)} to ${fixed(group.low + group.spread, 2)})`)))),
    shown.length === 0 && h("div", { class: "empty" }, state.rollouts.length ? "No group fits the filter." : "This step has no rollouts in its file."));
}

export function cellOf(rollout, state, low, high) {
  const { reward, outcome } = rollout;
  const text = `${rollout.rollout_id}\nreward ${fixed(reward)} · advantage ${fixed(rollout.advantage)}\n${rollout.completion_tokens} tokens in ${rollout.turns} turns\n${outcomeText(outcome)}`;
  const kind = outcome.state === "failed" ? " failed" : outcome.state === "trained" || outcome.reason === "evaluation" ? "" : " untrained";
  return h("span", { class: `cell${kind}${passes(rollout, state.filter, state.holds) ? "" : " dim"}`, style: isNumber(reward) ? { background: rewardColor(reward, low, high) } : {},
    onpointermove: (event) => showTip(visible(text), event.clientX, event.clientY), onpointerleave: () => showTip("") }, isNumber(reward) ? "" : "×");
}

function drawHistogram(target, axis, state, set) {
  const { low, high, parts } = histogram(state.rollouts);
  const most = Math.max(1, ...parts.map(({ count }) => count));
  replace(target, parts.map(({ count, range }) => {
    const pressed = state.filter.reward === range;
    return h("button", { disabled: !count, title: `${range}: ${count} rollouts`, "aria-label": `Rewards ${range}: ${count} rollouts`, "aria-pressed": String(pressed), onclick: () => set({ reward: pressed ? "" : range }) }, h("i", { style: { height: `${(100 * count) / most}%` } }));
  }));
  replace(axis, h("span", {}, fixed(low, 2)), h("span", {}, fixed(high, 2)));
}

function drawAbout(target, state) {
  const passing = state.rollouts.filter((rollout) => passes(rollout, state.filter, state.holds));
  const flat = state.groups.filter((group) => group.isFlat).length;
  const rewards = passing.map((rollout) => rollout.reward).filter(isNumber);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const lengths = passing.map((rollout) => rollout.completion_tokens);
  const outcomes = {};
  for (const rollout of passing) outcomes[outcomeText(rollout.outcome)] = (outcomes[outcomeText(rollout.outcome)] ?? 0) + 1;
  replace(target, h("dl", { class: "facts", style: { marginTop: "8px" } },
    [["groups", `${state.groups.length}${flat ? `, ${flat} without spread` : ""}`], ["rollouts", `${passing.length} of ${state.rollouts.length}`], ["mean reward", fixed(mean)], ["mean length", compact(lengths.some(Boolean) ? lengths.reduce((sum, length) => sum + length, 0) / lengths.length : null)], ...Object.entries(outcomes)]
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])));
}

function drawMatches(target, answer, state, numHere, goOn) {
  const others = answer.matches.filter((match) => match.step !== state.step || match.kind !== state.kind);
  const unseen = [answer.left && `${answer.left} files`, answer.left_out && `${compact(answer.left_out)} rollouts of large files`].filter(Boolean).join(" and ");
  const isOpen = target.firstElementChild?.open || (others.length > 0 && (!numHere || !state.holds || state.rounds > 0));
  replace(target, h("details", { class: "panel pad", open: isOpen, style: { margin: "0 0 10px" } },
    h("summary", {}, `${numHere} rollouts of this step fit, ${others.length} of other steps${unseen && `; ${unseen} were not searched`}`),
    others.map((match) => h("div", {}, h("a", { href: to(state.run, "rollout", { kind: match.kind === "step" ? "" : match.kind, step: match.step, id: match.rollout_id }) }, `${match.kind} ${match.step}`), ` reward ${fixed(match.reward, 2)} `, h("span", { class: "mono soft", dir: "auto" }, visible(match.excerpt)))),
    answer.left > 0 && h("button", { onclick: goOn }, "search on")));
}
