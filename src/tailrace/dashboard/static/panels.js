// The curves of a run, in the order in which one asks: does it learn, is it sound, is it fast.
import { bytes, compact, percent, seconds } from "./format.js";

const phaseName = (name) => name.replace(/^phase\//, "").replace(/\/wall_s$/, "");

export const PANELS = [
  { id: "reward", title: "Reward", unit: "mean of a step, and its spread", wide: true, height: 210, names: ["reward/mean"], band: ["reward/mean", "reward/std"] },
  { id: "environments", title: "Reward by environment", unit: "mean of a step", names: ["reward/*/mean"], least: 2 },
  { id: "held-out", title: "Held-out reward", unit: "evaluations beside training", names: ["eval/*/reward/mean"], points: true },
  { id: "spread", title: "Spread", unit: "of rewards; share of groups without any", names: ["reward/std", "group/zero_spread_share"] },
  { id: "environment-spread", title: "Groups without spread", unit: "by environment", names: ["reward/*/zero_spread_share"], least: 2, show: percent },
  { id: "components", title: "Reward components", unit: "mean per rollout", names: ["reward_component/*"] },
  { id: "lengths", title: "Rollout length", unit: "tokens", names: ["rollout/completion_tokens", "rollout/tokens"], show: compact },
  { id: "turns", title: "Turns", unit: "per rollout", names: ["rollout/turns", "rollout/branches"] },
  { id: "outcomes", title: "Shares of rollouts", unit: "", names: ["rollout/truncated_share", "rollout/failed_share", "bias/masked_share"], show: percent },
  { id: "loss", title: "Loss", unit: "of the optimizer step", names: ["training/loss", "training/reward_loss"] },
  { id: "gradient", title: "Gradient norm", unit: "before clipping", names: ["training/grad_norm"] },
  { id: "kl", title: "KL", unit: "nats per token, from the policy that sampled", names: ["training/kl", "training/reference_kl", "training/distillation"] },
  { id: "entropy", title: "Entropy", unit: "nats per token", names: ["training/entropy"] },
  { id: "effective", title: "Effective sample size", unit: "share of the tokens", names: ["training/effective_sample_share"], show: percent },
  { id: "clipped", title: "Clipped and rejected", unit: "share of tokens", names: ["training/clip_share", "training/rejected_share", "training/rejected_share/*"], show: percent },
  { id: "difference", title: "Trainer and generator", unit: "|log-probability difference|, nats", names: ["training/logprob_difference", "training/logprob_difference_fresh", "training/logprob_difference_mixed"] },
  { id: "ratio", title: "Highest ratio", unit: "trainer to generator", names: ["training/ratio_max"] },
  { id: "staleness", title: "Staleness", unit: "policy versions", names: ["staleness/mean", "staleness/max"] },
  { id: "throughput", title: "Throughput", unit: "tokens/s", names: ["generation/tokens_per_s", "training/tokens_per_s"], show: compact },
  { id: "waits", title: "Waits", unit: "per step", names: ["scheduler/*_wait_s"], show: seconds },
  { id: "flow", title: "In flight", unit: "rollouts, groups, batches", names: ["scheduler/in_flight", "scheduler/ready_groups", "scheduler/queued_batches"], show: compact },
  { id: "phases", title: "Phases", unit: "wall time per step, logarithmic; rollouts overlap", names: ["phase/*/wall_s"], most: 7, log: true, show: seconds, label: phaseName },
  { id: "lag", title: "Event-loop lag", unit: "logarithmic", names: ["lag/p50_s", "lag/p99_s", "lag/max_s", "lag/held_max_s"], log: true, show: seconds },
  { id: "memory", title: "Memory", unit: "resident, by role", names: ["memory/*_rss_bytes"], show: bytes },
];

/** What the server is asked for; of a panel that draws the largest few, those alone. */
export const EVERY_NAME = [...new Set(["rollout/generated_tokens", "policy/version", ...PANELS.flatMap(({ names, band, most }) => [...names.map((name) => (most ? `${name}:${most}` : name)), ...(band ?? [])])])];

/** Which metrics a panel draws of those that there are; none where there are too few for it. */
export function namesOf(panel, store) {
  let names = panel.names.flatMap((pattern) => store.matching(pattern));
  if (panel.id === "environments") names = names.filter((name) => name !== "reward/mean");
  names = names.filter((name) => store.values(name).some((value) => value !== null));
  if (panel.log || panel.id === "waits") names = names.filter((name) => store.values(name).some((value) => value > 0));
  if (panel.most && names.length > panel.most) {
    const total = (name) => store.values(name).reduce((sum, value) => sum + (value ?? 0), 0);
    names = names.sort((a, b) => total(b) - total(a)).slice(0, panel.most);
  }
  return names.length >= (panel.least ?? 1) ? names : [];
}

/** A metric's label beside others of its panel: without what all have. */
export function labelOf(name, names, panel) {
  if (panel?.label) return panel.label(name);
  if (names.length < 2) return name.split("/").slice(-1)[0] === "mean" ? name.replace(/\/mean$/, "") : name.split("/").slice(1).join("/") || name;
  const parts = names.map((one) => one.split("/"));
  let head = 0;
  while (parts.every((part) => part.length > head + 1 && part[head] === parts[0][head])) head++;
  let tail = 0;
  while (parts.every((part) => part.length > head + tail + 1 && part.at(-1 - tail) === parts[0].at(-1 - tail))) tail++;
  const own = name.split("/");
  return own.slice(head, own.length - tail).join("/");
}

