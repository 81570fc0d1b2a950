// Rollouts of a file as groups, and how those can be filtered and sorted.
import { isNumber, short } from "./format.js";

/** In the order of the file: `{ id, task, environment, rollouts, mean, spread, isFlat, isLeftOut }`, of what the file has of a group. */
export function groupsOf(rollouts) {
  const groups = new Map();
  for (const rollout of rollouts) {
    let group = groups.get(rollout.group_id);
    if (!group) groups.set(rollout.group_id, (group = { id: rollout.group_id, task: rollout.task_id, environment: rollout.environment, rollouts: [] }));
    group.rollouts.push(rollout);
  }
  for (const group of groups.values()) {
    const rewards = group.rollouts.map((rollout) => rollout.reward).filter(isNumber);
    group.mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    group.low = rewards.length ? Math.min(...rewards) : null;
    group.spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
    group.isFlat = rewards.length > 1 && group.spread === 0;
    group.isLeftOut = group.rollouts.some((rollout) => rollout.outcome.reason === "zero_spread");
    group.tokens = group.rollouts.reduce((sum, rollout) => sum + rollout.completion_tokens, 0) / group.rollouts.length;
  }
  return [...groups.values()];
}

const range = (text) => {
  const [low, high] = (text ?? "").split("..").map((part) => (part.trim() === "" ? null : Number(part)));
  return [Number.isFinite(low) ? low : null, Number.isFinite(high) ? high : null];
};

/** Whether a rollout passes: `{ text, environment, outcome, reward: "0.5..1", length: "..200" }`. */
export function passes(rollout, filter, found) {
  if (filter.environment && rollout.environment !== filter.environment) return false;
  if (filter.outcome && rollout.outcome.state !== filter.outcome && rollout.outcome.reason !== filter.outcome) return false;
  const [low, high] = range(filter.reward);
  if ((low !== null || high !== null) && !isNumber(rollout.reward)) return false; // null is no 0 here
  if (low !== null && rollout.reward < low) return false;
  if (high !== null && rollout.reward > high) return false;
  const [short, long] = range(filter.length);
  if (short !== null && rollout.completion_tokens < short) return false;
  if (long !== null && rollout.completion_tokens > long) return false;
  const text = (filter.text ?? "").toLowerCase();
  return !text || found?.has(rollout.rollout_id) || rollout.task_id.toLowerCase().includes(text) || rollout.rollout_id.toLowerCase().includes(text) || rollout.error.toLowerCase().includes(text);
}

/** By what changed most since another step, on the same task: how much the mean reward moved, or null. */
export function changesSince(groups, before) {
  const means = new Map();
  for (const group of before) if (group.mean !== null) means.set(group.task, [...(means.get(group.task) ?? []), group.mean]);
  for (const group of groups) {
    const then = means.get(group.task);
    group.change = then && group.mean !== null ? group.mean - then.reduce((sum, mean) => sum + mean, 0) / then.length : null;
  }
}

const last = (value) => (value === null || value === undefined ? -Infinity : value);
export const SORTS = {
  file: ["order of training", null],
  best: ["highest reward", (a, b) => last(b.mean) - last(a.mean)],
  worst: ["lowest reward", (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
  spread: ["widest spread", (a, b) => last(b.spread) - last(a.spread)],
  longest: ["longest", (a, b) => b.tokens - a.tokens],
  change: ["what changed most", (a, b) => Math.abs(b.change ?? 0) - Math.abs(a.change ?? 0) || (b.change === null ? -1 : 0) - (a.change === null ? -1 : 0)],
};

/** Rewards in `bins` equal parts, from the lowest to the highest: `{ count, range }` of each, as `passes` takes ranges.
 *
 * A range is that of the part, so that it fits the next step's rewards too, unless a reward is so near to its edges that it would be on the wrong side.
 */
export function histogram(rollouts, bins = 24) {
  const rewards = rollouts.map((rollout) => rollout.reward).filter(isNumber);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const parts = Array.from({ length: bins }, () => []), width = (high - low) / bins;
  for (const reward of rewards) parts[Math.min(bins - 1, Math.floor(((reward - low) / (high - low)) * bins))].push(reward);
  const rangeOf = (part, i) => {
    const from = short(low + i * width), until = short(low + (i + 1) * width);
    return keeps(Number(from), Number(until), part, rewards) ? `${from}..${until}` : rangeAround(part, rewards);
  };
  return { low, high, parts: parts.map((part, i) => ({ count: part.length, range: rangeOf(part, i) })) };
}

/** From the lowest to the highest of a part, rounded outwards as far as no other reward comes in: `0.66..0.67`. */
function rangeAround(part, rewards) {
  const low = Math.min(...part), high = Math.max(...part);
  for (let unit = 100; unit <= 1e6; unit *= 10) {
    const from = Math.floor(low * unit) / unit, until = Math.ceil(high * unit) / unit;
    if (keeps(from, until, part, rewards)) return `${from}..${until}`;
  }
  return `${low}..${high}`;
}

/** Whether the rewards in a range are those of a part, where it has any. */
function keeps(from, until, part, rewards) {
  const isWithin = (reward) => reward >= from && reward <= until;
  return !part.length || (part.every(isWithin) && rewards.filter(isWithin).length === part.length);
}
