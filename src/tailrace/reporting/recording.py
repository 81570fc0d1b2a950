"""What the scheduler reports, as metrics: rewards, rollouts by outcome, batches, and the biases of asynchrony."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from tailrace.batching import SampledGroup
from tailrace.records import BatchSummary, Completion, Group, Outcome, Reward, Rollout, RolloutId, TerminalState
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.scheduling import UNSCORED

_OF_ROLLOUTS = {
    name: f"rollout/{name}"
    for name in (
        *("drifted_turns", "realigned_turns", "rewritten_turns", "cut_tokens", "tool_calls", "malformed_tool_calls"),
        *("generate_s", "score_s", "environment_s"),
    )
}
_OF_COMPLETIONS = {
    name: f"generation/{name}"
    for name in (
        *("queue_s", "time_to_first_token_s", "decode_s", "cached_prompt_tokens"),
        *("in_flight", "preemptions", "mixed_cache_tokens", "nonfinite_logprobs"),
    )
}
_REWARDED = (TerminalState.TRAINED, TerminalState.FILTERED)
"""Outcomes whose rewards are a step's: those of a failed rollout, or of one that the end of a run cancels, are not."""


@dataclass(slots=True)
class _BiasCounts:
    """Of one step."""

    ended_rollouts: int = 0
    ended_tokens: int = 0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    loss_tokens: int = 0
    wasted_tokens: int = 0


class BiasMeter:
    """Whether what is trained on is what was generated: what `RunTotals.ratios` compares, in sampled tokens.

    Counted are rollouts that finished after warm-up, once they end. `length_ratio` is the mean length of those trained
    over that of all; below 1, long rollouts are lost on the way. Where all are trained it is exactly 1.
    """

    def __init__(self, *, warmup_steps: int = 1) -> None:
        self._warmup_steps = warmup_steps
        self._counts = _BiasCounts()
        self._on_the_way: set[RolloutId] = set()
        """Finished after warm-up, and not terminal yet."""
        self._newly_trained: set[RolloutId] = set()
        """Those of them that were trained since the last step, of which only a step's batch knows the loss tokens."""
        self._cut: Counter[RolloutId] = Counter()
        self._losing: dict[RolloutId, int] = {}

    def skip_warmup(self) -> None:
        """The run had it before it was resumed."""
        self._warmup_steps = 0

    def finished(self, rollout: Rollout) -> None:
        """An agent returned."""
        if not self._warmup_steps:
            self._on_the_way.add(rollout.rollout_id)

    def ended(self, rollout: Rollout, outcome: Outcome) -> None:
        """A rollout is terminal. Filtered or failed it is wasted; what only the end of a run cancels is no waste."""
        tokens, counts = rollout.num_completion_tokens, self._counts
        if rollout.rollout_id in self._on_the_way:
            self._on_the_way.remove(rollout.rollout_id)
            counts.ended_rollouts += 1
            counts.ended_tokens += tokens
            if outcome.state is TerminalState.TRAINED:
                self._newly_trained.add(rollout.rollout_id)
        if outcome.state in (TerminalState.FILTERED, TerminalState.FAILED):
            counts.wasted_tokens += tokens
        self._cut.pop(rollout.rollout_id, None)

    def cut(self, rollout_id: RolloutId, tokens: int) -> None:
        """A completion of this rollout was cancelled with `tokens` sampled. Call it before `losing`."""
        self._cut[rollout_id] += tokens

    def forget_cut(self, rollout_id: RolloutId) -> None:
        """What was cut of this rollout is not to be counted."""
        self._cut.pop(rollout_id, None)

    def losing(self, rollout: Rollout) -> int:
        """A rollout failed or was cancelled. Returns what it sampled: its finished turns, and what was cut.

        That is wasted once the rollout is `lost`; one that only the end of the run cancels never is.
        """
        tokens = self._losing[rollout.rollout_id] = rollout.num_completion_tokens + self._cut.pop(rollout.rollout_id, 0)
        return tokens

    def lost(self, rollout_id: RolloutId) -> None:
        """A rollout is terminal that never finished: all that it sampled is wasted."""
        self._counts.wasted_tokens += self._losing.pop(rollout_id, 0)

    def step_ended(self, groups: Iterable[SampledGroup]) -> None:
        """The rollouts of a batch, formed of these groups, have ended."""
        newly_trained, self._newly_trained = self._newly_trained, set()
        for group in groups if newly_trained else ():
            for rollout, loss_tokens in zip(group.trained, group.loss_tokens, strict=True):
                if rollout.rollout_id in newly_trained:
                    self._counts.trained_rollouts += 1
                    self._counts.trained_tokens += rollout.num_completion_tokens
                    self._counts.loss_tokens += loss_tokens
        self._warmup_steps = max(0, self._warmup_steps - 1)

    def flush(self) -> dict[str, float]:
        """The step's metrics; starts over."""
        counts, self._counts = self._counts, _BiasCounts()
        return {f"bias/{name}": count for name, count in dataclasses.asdict(counts).items()}


class RunRecorder(MetricsAccumulator):
    """Turns what the scheduler reports into metrics: O(rollouts), never O(tokens)."""

    def __init__(self, *, warmup_steps: int = 1) -> None:
        super().__init__()
        self.bias = BiasMeter(warmup_steps=warmup_steps)

    def completion(self, completion: Completion) -> None:
        """A request ended."""
        self.add("generation/completion_tokens", completion.num_tokens)
        self._add_known(_OF_COMPLETIONS, completion.metrics)

    def rollout_finished(self, rollout: Rollout) -> None:
        """An agent returned."""
        self.bias.finished(rollout)
        self.add("rollout/turns", rollout.turns)
        self.add("rollout/branches", len(rollout.branches))
        self.add("rollout/tokens", rollout.num_tokens)
        self.add("rollout/completion_tokens", rollout.num_completion_tokens)
        self.add("rollout/truncated_share", float(rollout.truncated))
        self.add("rollout/duration_s", max(0.0, rollout.ended_s - rollout.started_s))
        self._add_known(_OF_ROLLOUTS, rollout.metrics)

    def _add_known(self, names: Mapping[str, str], found: Mapping[str, float]) -> None:
        """Of what a rollout or a completion brings, what is a metric."""
        for name, value in found.items():
            if (metric := names.get(name)) is not None:
                self.add(metric, value)

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome) -> None:
        """A rollout is terminal; None where it was lost."""
        is_unscored = outcome.reason == UNSCORED
        self.add("rollout/failed_share", float(is_unscored or outcome.state is TerminalState.FAILED))
        trained = outcome.state is TerminalState.TRAINED
        self.add("rollout/trained" if trained else f"rollout/{outcome.state}/{outcome.reason}", 1)
        if rollout is None:
            self.bias.lost(rollout_id)
            return
        self.bias.ended(rollout, outcome)
        if is_unscored:
            self.add(f"environment/{rollout.task.environment}/failed/{UNSCORED}", 1)
        if rollout.reward is not None and outcome.state in _REWARDED:
            self._add_reward(rollout.task.environment, rollout.reward, trained=trained)

    def tokens_dropped(self, rollout: Rollout, tokens: int, outcome: Outcome) -> None:
        """A rollout is terminal for which so many tokens were sampled, those of a completion that was cut included."""
        if outcome.state is TerminalState.TRAINED:
            return
        for whose in ("rollout", f"environment/{rollout.task.environment}"):
            self.add(f"{whose}/dropped_tokens/{outcome.reason}", tokens)

    def _add_reward(self, environment: str, reward: Reward, *, trained: bool) -> None:
        for name in ("reward/mean", "reward/std", "reward/min", "reward/max"):
            self.add(name, reward.value)
        for name in ("mean", "std"):
            self.add(f"reward/{environment}/{name}", reward.value)
        if trained:
            self.add("batch/reward_mean", reward.value)
        for component, value in reward.components.items():
            if math.isfinite(value):
                self.add(f"reward_component/{component}", value)

    def group_scored(self, group: Group) -> None:
        """A group has its rewards."""
        values = [rollout.reward.value for rollout in group.rollouts if rollout.reward is not None]
        if not values:
            return
        zero_spread = float(min(values) == max(values))
        self.add(f"reward/{group.task.environment}/zero_spread_share", zero_spread)
        self.add("group/zero_spread_share", zero_spread)
        self.add("group/size", len(group.rollouts))
        if "score_group_s" in group.metrics:
            self.add("group/score_s", group.metrics["score_group_s"])

    def step_ended(self, batch: BatchSummary, groups: Iterable[SampledGroup]) -> None:
        """The trainer is done with this batch, formed of these groups; their rollouts have ended."""
        groups = [*groups]
        self.bias.step_ended(groups)
        for group in groups:
            self.add(f"environment/{group.group.task.environment}/masked_tokens", group.masked_tokens)
        for name, value in (
            ("batch/samples", batch.num_samples),
            ("batch/rollouts", batch.num_rollouts),
            ("batch/tokens", batch.num_tokens),
            ("batch/loss_tokens", batch.loss_tokens),
            ("batch/masked_tokens", batch.masked_tokens),
            ("staleness/max", batch.staleness_max),
        ):
            self.add(name, value)
        if batch.num_rows:  # an outside trainer lays its own
            self.add("batch/rows", batch.num_rows)
            self.add("batch/padding", batch.padding)
        self.add("staleness/mean", batch.staleness_mean, weight=batch.loss_tokens)
        if batch.cross_entropy_tokens:
            self.add("batch/cross_entropy_tokens", batch.cross_entropy_tokens)
        for name in batch.weightless_tokens:
            self.add(f"batch/{name.removesuffix('_weights')}_tokens", batch.weighted_tokens(name))

    @override
    def flush(self) -> dict[str, float]:
        """The step's metrics; starts over."""
        self.update(self.bias.flush())
        return super().flush()
