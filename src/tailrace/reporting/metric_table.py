"""The table of metric names: unit, reduction over a step, and what each one means."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reduction(enum.StrEnum):
    """How the values recorded during one step become one number."""

    MEAN = "mean"
    """Weighted mean."""
    STD = "std"
    """Weighted standard deviation of the values themselves (never of other deviations)."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """The newest value: what a gauge shows."""
    TOTAL = "total"
    """The newest value of a count since the run began, over all of its starts."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table."""

    name: str
    """The name, or a family of names with `{placeholders}`."""
    unit: str
    """`1` for a plain number or a share of 0 to 1."""
    reduction: Reduction
    description: str


_MEAN, _STD, _SUM, _MAX, _MIN, _LAST, _TOTAL = Reduction

_ROWS = (
    ("reward/mean", "1", _MEAN, "Reward of rollouts in the step's batch, and of those filtered since the last one."),
    ("reward/std", "1", _STD, "Standard deviation of those rewards."),
    ("reward/min", "1", _MIN, "Lowest of those rewards."),
    ("reward/max", "1", _MAX, "Highest of those rewards."),
    ("reward/{environment}/mean", "1", _MEAN, "Reward of those of one environment."),
    ("reward/{environment}/std", "1", _STD, "Standard deviation of the rewards of one environment."),
    ("reward/{environment}/zero_spread_share", "1", _MEAN, "Share of one environment's groups that teach nothing."),
    ("reward_component/{component}", "1", _MEAN, "Parts of the reward, and what environments report, per rollout."),
    ("environment/{environment}/trained_share", "1", _LAST, "Its share of all trained tasks; its weight is the aim."),
    ("environment/{environment}/in_flight", "tasks", _LAST, "Its tasks handed out and in no batch yet."),
    ("environment/{environment}/trainable_share", "1", _LAST, "Share of its newest tasks that were trained on."),
    ("environment/{environment}/barren_tasks", "tasks", _LAST, "Its untrainable tasks that came after 32 in a row."),
    ("environment/{environment}/failed/{reason}", "rollouts", _SUM, "Its rollouts that failed for this reason."),
    ("group/zero_spread_share", "1", _MEAN, "Share of scored groups whose rewards are all equal: they teach nothing."),
    ("group/size", "rollouts", _MEAN, "Rollouts that came back per scored group."),
    ("group/score_s", "s", _MEAN, "Time of a group in its `score_group` or judge, waiting for a place left out."),
    ("judge/calls", "calls", _SUM, "Calls of the judges since the last step, failed ones and evaluations included."),
    ("judge/retries", "calls", _SUM, "Those of them that repeat one that failed or was not valid."),
    ("judge/failed_groups", "groups", _SUM, "Groups that no call brought valid scores for."),
    ("judge/prompt_tokens", "tokens", _SUM, "Prompt tokens of the calls that were answered."),
    ("judge/completion_tokens", "tokens", _SUM, "Tokens of those answers."),
    ("judge/cost", "1", _SUM, "What they cost by the prices of the judge's settings."),
    ("rollout/turns", "turns", _MEAN, "Calls of `generate` per rollout."),
    ("rollout/branches", "branches", _MEAN, "Token sequences per rollout; more than 1 where an agent rewrote history."),
    ("rollout/tokens", "tokens", _MEAN, "Tokens of a rollout, context included."),
    ("rollout/completion_tokens", "tokens", _MEAN, "Tokens of a rollout that the policy sampled."),
    ("rollout/generated_tokens", "tokens", _SUM, "Sampled tokens of rollouts that came back, failed or were stopped."),
    ("rollout/truncated_share", "1", _MEAN, "Share of rollouts with a turn that ended for length."),
    ("rollout/drifted_turns", "turns", _SUM, "Turns whose re-rendered tokens differ from the sampled ones."),
    ("rollout/realigned_turns", "turns", _SUM, "Drifted turns that kept their branch: only tokenization had changed."),
    ("rollout/rewritten_turns", "turns", _SUM, "Turns whose history the agent rewrote: a new branch began."),
    ("rollout/cut_tokens", "tokens", _SUM, "Sampled after a string that `chat(stop=...)` names, and cut off."),
    ("rollout/tool_calls", "calls", _SUM, "Well-formed tool calls of the policy."),
    ("rollout/malformed_tool_calls", "calls", _SUM, "Tool calls that could not be parsed."),
    ("rollout/failed_share", "1", _MEAN, "Share of rollouts that ended without a reward."),
    ("rollout/failed/{reason}", "rollouts", _SUM, "Rollouts that failed for this reason."),
    ("rollout/filtered/{reason}", "rollouts", _SUM, "Rollouts that finished and were not trained on, for this reason."),
    ("rollout/cancelled/{reason}", "rollouts", _SUM, "Rollouts that were stopped, for this reason."),
    ("rollout/duration_s", "s", _MEAN, "From a rollout's admission to its end."),
    ("rollout/generate_s", "s", _MEAN, "Time of a rollout spent waiting for `generate`."),
    ("rollout/score_s", "s", _MEAN, "Time of a rollout spent in its reward."),
    ("rollout/environment_s", "s", _MEAN, "Time of a rollout spent in its environment or agent."),
    ("eval/{environment}/reward/mean", "1", _MEAN, "Reward of held-out tasks, each run once; lost ones left out."),
    ("eval/{environment}/reward/standard_error", "1", _LAST, "Of that mean."),
    ("eval/{environment}/tasks", "tasks", _LAST, "Held-out tasks that were scored."),
    ("eval/{environment}/failed", "rollouts", _LAST, "Held-out tasks whose rollout was lost."),
    ("eval/{environment}/policy_version/min", "versions", _LAST, "Oldest version that sampled a token of it."),
    ("eval/{environment}/policy_version/max", "versions", _LAST, "Newest version that sampled a token of it."),
    ("eval/{environment}/completion_tokens", "tokens", _MEAN, "Tokens of its rollouts that the policy sampled."),
    ("eval/{environment}/truncated_share", "1", _MEAN, "Share of its rollouts with a turn that ended for length."),
    ("eval/{environment}/reward_component/{component}", "1", _MEAN, "What those rewards were made of, per rollout."),
    ("eval/duration_s", "s", _LAST, "From the evaluation's first rollout to its last."),
    ("eval/coalesced", "evaluations", _TOTAL, "Evaluations left out so far, because a newer one fell due first."),
    ("batch/samples", "samples", _SUM, "Training samples of the step's batch."),
    ("batch/rollouts", "rollouts", _SUM, "Rollouts of the step's batch."),
    ("batch/reward_mean", "1", _MEAN, "Reward of rollouts in the step's batch alone, so of groups with spread."),
    ("batch/rows", "rows", _SUM, "Rows of the step's batch."),
    ("batch/tokens", "tokens", _SUM, "Tokens of the step's batch, context included."),
    ("batch/loss_tokens", "tokens", _SUM, "Tokens that bear loss: the planned denominator of the loss."),
    ("batch/cross_entropy_tokens", "tokens", _SUM, "Tokens that bear cross-entropy: its planned denominator."),
    ("batch/masked_tokens", "tokens", _SUM, "Sampled tokens that lost their loss to staleness."),
    ("batch/padding", "1", _MEAN, "Padding share: 1 - tokens / what rows would be padded to by a trainer that pads."),
    ("staleness/mean", "versions", _MEAN, "Mean age of the tokens that bear loss, weighted by their number."),
    ("staleness/max", "versions", _MAX, "Age of the oldest token that bears loss."),
    ("bias/length_ratio", "1", _LAST, "Mean length of trained rollouts over that of all finished; 1 is unbiased."),
    (
        "bias/loss_length_ratio",
        "1",
        _LAST,
        "The same ratio of the same rollouts, over lengths that bear loss.",
    ),
    ("bias/wasted_tokens", "tokens", _SUM, "Sampled tokens of rollouts that will never be trained on."),
    ("bias/ended_rollouts", "rollouts", _SUM, "Of the length ratios: finished after the first step, and ended since."),
    ("bias/ended_tokens", "tokens", _SUM, "Sampled tokens of those rollouts."),
    ("bias/trained_rollouts", "rollouts", _SUM, "Those of them that were trained on."),
    ("bias/trained_tokens", "tokens", _SUM, "Sampled tokens of the trained ones."),
    ("bias/loss_tokens", "tokens", _SUM, "Tokens of the trained ones that bore loss."),
    ("bias/masked_share", "1", _LAST, "Stale tokens over all tokens in trained batches."),
    ("generation/tokens_per_s", "tokens/s", _LAST, "Tokens sampled per second since the last step."),
    ("generation/queue_s", "s", _MEAN, "Time from a request's arrival to its first forward pass."),
    ("generation/time_to_first_token_s", "s", _MEAN, "Time from a request's arrival to its first token."),
    ("generation/decode_s", "s", _MEAN, "Time from a completion's first token to its last."),
    ("generation/cached_prompt_tokens", "tokens", _SUM, "Prompt tokens that the engines' caches held already."),
    ("generation/in_flight", "requests", _MEAN, "Requests accepted by a generator and not resolved, as each ended."),
    ("generation/preemptions", "requests", _SUM, "Times that a running request was stopped and computed again."),
    ("generation/mixed_cache_tokens", "tokens", _SUM, "Tokens sampled over keys and values partly of older weights."),
    ("generation/nonfinite_logprobs", "tokens", _SUM, "Sampled tokens whose log-probability was NaN or infinite."),
    ("generation/completion_tokens", "tokens", _SUM, "Tokens sampled by the requests that ended."),
    ("generation/load_model_state_dict_s", "s", _MEAN, "Time to install new weights between two engine steps."),
    ("generation/failed_loads", "loads", _SUM, "Versions that a generator could not install, however often it tried."),
    ("generator/{replica}/requests", "requests", _LAST, "Requests of the run in flight on this replica."),
    ("generator/{replica}/running_tokens", "tokens", _LAST, "Tokens of its running requests, by its last report."),
    ("generator/{replica}/policy_version", "versions", _LAST, "Version of the weights that it holds."),
    ("generator/{replica}/serving", "1", _LAST, "1 while it takes requests; 0 while it is away or starved of weights."),
    ("generator/{replica}/restarts", "restarts", _TOTAL, "How often it was started or connected to again, in all."),
    ("generator/{replica}/failovers", "requests", _TOTAL, "Requests that moved on as it died or was stuck, in all."),
    ("payloads/recorded_bytes", "bytes", _SUM, "Routed experts that completions brought since the last step."),
    ("payloads/released_bytes", "bytes", _SUM, "Those whose rollouts have ended since: their room is used again."),
    ("payloads/held_bytes", "bytes", _LAST, "Those of rollouts that have not ended, in the payload store."),
    ("weights/sent_bytes", "bytes", _SUM, "Weights sent to generators of other hosts since the last step."),
    ("weights/sent_share", "1", _LAST, "Those over what they come to without deltas."),
    ("weights/changed_share", "1", _LAST, "Share of the weights' bytes that had changed, of those sent as deltas."),
    ("weights/whole_sends", "loads", _SUM, "Times that all weights were sent, and no delta."),
    ("training/loss", "1", _MEAN, "Loss of the optimizer step, components included."),
    ("training/reward_loss", "1", _MEAN, "The loss of rewards alone, where components are added to it."),
    ("training/reference_kl", "nats", _MEAN, "Divergence of the trained policy from the reference model, per token."),
    ("training/grad_norm", "1", _MEAN, "Norm of the gradients before clipping."),
    ("training/learning_rate", "1", _LAST, "Learning rate of the optimizer step."),
    ("training/kl", "nats", _MEAN, "Estimated divergence of the trained policy from the one that sampled, per token."),
    ("training/entropy", "nats", _MEAN, "Entropy of the trained policy, per token."),
    ("training/clip_share", "1", _MEAN, "Share of tokens whose ratio was clipped."),
    ("training/rejected_share", "1", _MEAN, "Share of the planned loss tokens that masks or the loss did not keep."),
    ("training/rejected_share/{reason}", "1", _MEAN, "Share that this mask or loss rejects; two may reject the same."),
    (
        "training/effective_sample_share",
        "1",
        _MEAN,
        "Effective sample size of the importance weights w, (Σw)² / Σw², per planned token; 1: all are equal.",
    ),
    ("training/ratio_mean", "1", _MEAN, "Mean probability ratio of trainer to generator; 1 where both agree."),
    ("training/ratio_max", "1", _MAX, "Highest probability ratio of trainer to generator, before truncation."),
    ("training/logprob_difference", "nats", _MEAN, "Mean |difference| of trainer's and generator's log-probabilities."),
    (
        "training/logprob_difference_fresh",
        "nats",
        _MEAN,
        "The same over tokens that the trainer's own version sampled over its own keys and values: numerics alone.",
    ),
    (
        "training/logprob_difference_mixed",
        "nats",
        _MEAN,
        "The same over tokens that it sampled over keys and values of older versions: what a kept cache costs.",
    ),
    ("training/{environment}/loss_tokens", "tokens", _SUM, "One environment's tokens that bore loss."),
    ("training/{environment}/loss", "1", _MEAN, "Their mean loss, over those that were kept."),
    ("training/{environment}/kl", "nats", _MEAN, "Their divergence from the policy that sampled them."),
    (
        "training/distillation",
        "nats",
        _MEAN,
        "log π of the policy less that of the teacher, per token: 0 where they agree.",
    ),
    ("training/{environment}/distillation", "nats", _MEAN, "The same of one environment's tokens."),
    ("training/cross_entropy", "nats", _MEAN, "-log π of the tokens that bear cross-entropy."),
    ("training/{environment}/cross_entropy", "nats", _MEAN, "-log π of one environment's tokens that bear it."),
    ("training/{environment}/reference_kl", "nats", _MEAN, "The trained policy's divergence from the reference there."),
    ("training/{environment}/entropy", "nats", _MEAN, "The trained policy's entropy at them."),
    ("training/{environment}/clip_share", "1", _MEAN, "Share of them whose ratio was clipped."),
    ("training/{environment}/rejected_share", "1", _MEAN, "Share of them that masks or the loss did not keep."),
    ("training/{environment}/effective_sample_share", "1", _MEAN, "Effective sample size of their weights, as above."),
    ("training/{environment}/ratio_mean", "1", _MEAN, "Their mean probability ratio of trainer to generator."),
    ("training/{environment}/logprob_difference", "nats", _MEAN, "Their mean |difference| of log-probabilities."),
    ("training/replayed_share", "1", _MEAN, "Share of routings (token, layer) that follow the recorded ones."),
    ("training/router_agreement", "1", _MEAN, "Share of replayed experts that the trainer's router would choose."),
    ("training/tokens_per_s", "tokens/s", _LAST, "Tokens trained per second of the step's compute."),
    ("training/mfu", "1", _LAST, "Share of the devices' peak that the step's model FLOPs are (docs/trainer.md)."),
    ("training/memory_bytes", "bytes", _LAST, "Most memory of a rank: peak on its GPU, or resident on a CPU."),
    ("training/step_s", "s", _LAST, "Compute of the optimizer step: forward, backward, update."),
    ("training/publish_s", "s", _LAST, "Time to publish the new model state dict."),
    ("training/checkpoint_s", "s", _LAST, "Time to write a checkpoint, beside training."),
    (
        "training/checkpoint_stall_s",
        "s",
        _LAST,
        "Time that training stood still to copy its state for a checkpoint.",
    ),
    ("scheduler/in_flight", "rollouts", _LAST, "Rollouts admitted and not yet terminal."),
    ("scheduler/admitted", "rollouts", _TOTAL, "Rollouts admitted since the run began."),
    ("scheduler/budget_wait_s", "s", _SUM, "Time in which admission waited for the staleness budget."),
    ("scheduler/engines_wait_s", "s", _SUM, "Time in which admission waited, as all slots of the engines were busy."),
    ("scheduler/buffer_wait_s", "s", _SUM, "Time in which admission waited: enough finished groups stood ready."),
    ("scheduler/weights_wait_s", "s", _SUM, "Time in which admission waited for newer weights to be installed."),
    ("scheduler/failing_wait_s", "s", _SUM, "Time in which admission waited, as every environment with tasks fails."),
    ("scheduler/trainer_wait_s", "s", _SUM, "Time in which the trainer had no batch: it waited for groups."),
    ("scheduler/held_s", "s", _SUM, "Time in which a full batch was held back by `on_stale = wait`."),
    ("scheduler/enough_wait_s", "s", _SUM, "Time in which admission waited: what was started fills the last steps."),
    ("scheduler/edge_wait_s", "s", _SUM, "Time in which admission waited, over-sampling, for a step's edge."),
    ("scheduler/restarted_groups", "groups", _TOTAL, "Groups that were stopped and started again since the run began."),
    ("scheduler/set_aside", "rollouts", _LAST, "Rollouts that stopped at the edge of a step, and go on in the next."),
    ("scheduler/ready_groups", "groups", _LAST, "Scored groups that wait for their batch."),
    ("scheduler/queued_batches", "batches", _LAST, "Batches sent and not yet trained."),
    ("policy/version", "versions", _LAST, "Policy version after the step."),
    ("lag/p50_s", "s", _MAX, "Event-loop lag: median of a step."),
    ("lag/p90_s", "s", _MAX, "Event-loop lag: 90th percentile of a step."),
    ("lag/p99_s", "s", _MAX, "Event-loop lag: 99th percentile of a step."),
    ("lag/max_s", "s", _MAX, "Event-loop lag: longest of a step."),
    ("phase/{name}/wall_s", "s", _SUM, "Wall time in this phase, less phases inside it; concurrent ones add up."),
    ("phase/{name}/cpu_s", "s", _SUM, "CPU time; on the event loop stretches under 40 µs count as computation."),
    ("phase/{name}/held_s", "s", _SUM, "Time in which this phase held its process's event loop."),
    ("phase/{name}/lag_p50_s", "s", _MAX, "Loop lag caused by this phase: its turns on the loop, median."),
    ("phase/{name}/lag_p90_s", "s", _MAX, "Loop lag caused by this phase: 90th percentile of its turns on the loop."),
    ("phase/{name}/lag_p99_s", "s", _MAX, "Loop lag caused by this phase: 99th percentile of its turns on the loop."),
    ("phase/{name}/lag_max_s", "s", _MAX, "Loop lag caused by this phase: its longest turn on the loop."),
    ("phase/{name}/moved_bytes", "bytes", _SUM, "Bytes that this phase worked on."),
    ("phase/{name}/count", "1", _SUM, "How often this phase ended."),
    ("memory/{role}_rss_bytes", "bytes", _MAX, "Resident memory of this role's process."),
    ("memory/kept_bytes", "bytes", _LAST, "Free memory that the orchestrator's allocator keeps."),
    ("memory/given_back_bytes", "bytes", _SUM, "Memory that was given back to the system (`malloc_trim`)."),
    ("memory/give_back_s", "s", _SUM, "Time that giving memory back took, in a thread."),
    ("cpu/{role}_s", "s", _SUM, "User and system CPU time of this role's process."),
    ("sinks/dropped_records", "records", _TOTAL, "Records that no file took so far: queue full or disk failing."),
)

METRICS: dict[str, MetricSpec] = {row[0]: MetricSpec(*row) for row in _ROWS}
"""Every metric there is, by name. `docs/metrics.md` is this table."""
