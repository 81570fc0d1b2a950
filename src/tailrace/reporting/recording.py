"""What the scheduler reports, as metrics: rewards, rollouts by outcome, batches, and the biases of asynchrony."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from tailrace.records import BatchSummary, Completion, Group, Outcome, Reward, Rollout, RolloutId, TerminalState
from tailrace.reporting.metrics import MetricsAccumulator

_OF_ROLLOUTS = {
    name: f"rollout/{name}"
    for name in (
        *("drifted_turns", "realigned_turns", "rewritten_turns", "tool_calls", "malformed_tool_calls"),
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
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, total: float, count: int = 1) -> None:
        self.total += total
        self.count += count

    def over(self, other: _Mean) -> float | None:
        """Ratio of the two means; None while one is unknown or 0."""
        if not self.count or not other.total:
            return None
        return (self.total / self.count) / (other.total / other.count)


class BiasMeter:
    """Whether what is trained on is what was generated: lengths in completion tokens, counted after warm-up.

    `length_ratio` is the mean length of trained rollouts over that of all that finished; below 1, long rollouts are
    lost on the way. `loss_length_ratio` counts only the tokens that bear loss. Both are of the same rollouts, those
    that finished after warm-up and have ended since: where all of them are trained the first is exactly 1.
    """

    def __init__(self, *, warmup_steps: int = 1) -> None:
        self._warmup_steps = warmup_steps
        self._steps = 0
        self._on_the_way: set[RolloutId] = set()
        """Finished after warm-up, and not terminal yet."""
        self._ended, self._trained = _Mean(), _Mean()
        self._loss_tokens = self._sampled_tokens = 0
        """Of the trained rollouts in batches after warm-up."""
        self._batch_tokens = 0
        self._cut: Counter[RolloutId] = Counter()
        self._losing: dict[RolloutId, int] = {}
        self.wasted_tokens = 0
        """Sampled tokens of rollouts that will never be trained on, since the run began, warm-up included."""
        self.masked_tokens = 0
        """Sampled tokens that lost their loss to staleness, since the run began."""

    def finished(self, rollout: Rollout) -> None:
        """An agent returned."""
        if self._is_warm:
            self._on_the_way.add(rollout.rollout_id)

    def ended(self, rollout: Rollout, outcome: Outcome) -> int:
        """A rollout is terminal. Returns the tokens that this wastes; what the end of a run cancels is no waste."""
        if rollout.rollout_id in self._on_the_way:
            self._on_the_way.remove(rollout.rollout_id)
            self._ended.add(rollout.num_completion_tokens)
            if outcome.state is TerminalState.TRAINED:
                self._trained.add(rollout.num_completion_tokens)
        wasted = rollout.num_completion_tokens if outcome.state in (TerminalState.FILTERED, TerminalState.FAILED) else 0
        self.wasted_tokens += wasted
        return wasted

    def cut(self, rollout_id: RolloutId, tokens: int) -> None:
        """A completion of this rollout was cancelled with `tokens` sampled. Call it before `losing`."""
        self._cut[rollout_id] += tokens

    def losing(self, rollout: Rollout) -> int:
        """A rollout failed or was cancelled. Returns what it sampled: its finished turns, and what was cut.

        That is wasted once the rollout is `lost`; one that only the end of the run cancels never is.
        """
        tokens = self._losing[rollout.rollout_id] = rollout.num_completion_tokens + self._cut.pop(rollout.rollout_id, 0)
        return tokens

    def lost(self, rollout_id: RolloutId) -> int:
        """A rollout is terminal that never finished. Returns what this wastes: all that it sampled."""
        tokens = self._losing.pop(rollout_id, 0)
        self.wasted_tokens += tokens
        return tokens

    def sent(self, batch: BatchSummary) -> None:
        """A batch is on its way to the trainer."""
        self._batch_tokens += batch.num_tokens
        self.masked_tokens += batch.masked_tokens
        if self._is_warm:
            self._loss_tokens += batch.loss_tokens
            self._sampled_tokens += batch.loss_tokens + batch.masked_tokens
        self._steps += 1

    @property
    def length_ratio(self) -> float | None:
        """None until something was trained after warm-up."""
        return self._trained.over(self._ended)

    @property
    def loss_length_ratio(self) -> float | None:
        """`length_ratio` by the share of trained rollouts' tokens that bear loss; None until there are both."""
        ratio = self.length_ratio
        return None if ratio is None or not self._sampled_tokens else ratio * self._loss_tokens / self._sampled_tokens

    @property
    def masked_share(self) -> float | None:
        """Masked tokens over all tokens in batches; None before the first batch."""
        return self.masked_tokens / self._batch_tokens if self._batch_tokens else None

    @property
    def _is_warm(self) -> bool:
        return self._steps >= self._warmup_steps


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
        failed = outcome.state is TerminalState.FAILED
        self.add("rollout/failed_share", float(failed))
        if outcome.state is not TerminalState.TRAINED:
            self.add(f"rollout/{outcome.state}/{outcome.reason}", 1)
        wasted = self.bias.lost(rollout_id) if rollout is None else self.bias.ended(rollout, outcome)
        self.add("bias/wasted_tokens", wasted)
        if rollout is not None and rollout.reward is not None and outcome.state in _REWARDED:
            self._add_reward(rollout.task.environment, rollout.reward, trained=outcome.state is TerminalState.TRAINED)

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

    def batch_sent(self, batch: BatchSummary) -> None:
        """A batch is on its way to the trainer."""
        self.bias.sent(batch)
        for name, value in (
            ("batch/samples", batch.num_samples),
            ("batch/rollouts", batch.num_rollouts),
            ("batch/rows", batch.num_rows),
            ("batch/tokens", batch.num_tokens),
            ("batch/loss_tokens", batch.loss_tokens),
            ("batch/masked_tokens", batch.masked_tokens),
            ("batch/padding", batch.padding),
            ("staleness/max", batch.staleness_max),
        ):
            self.add(name, value)
        self.add("staleness/mean", batch.staleness_mean, weight=batch.loss_tokens)

    @override
    def flush(self) -> dict[str, float]:
        """The step's metrics, the ratios of the whole run among them; starts over."""
        ratios = {
            "bias/length_ratio": self.bias.length_ratio,
            "bias/loss_length_ratio": self.bias.loss_length_ratio,
            "bias/masked_share": self.bias.masked_share,
        }
        self.update({name: ratio for name, ratio in ratios.items() if ratio is not None})
        return super().flush()
