"""A run's totals: the sum of its lines in `metrics.jsonl`, over all of its starts.

    a step ends ─► its line ─┬─► metrics.jsonl ─► on resume, the lines of steps that survive ─┐
                             └─► RunTotals.add                                RunTotals.add ◄─┘

Nothing is counted beside the lines, so what is told of a resumed run is what its files hold.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from tailrace.records import Json, TerminalState
from tailrace.reporting.curves import Curve
from tailrace.reporting.evaluation_figures import evaluated_environments, with_evaluation
from tailrace.reporting.metrics import Reduction, metric_spec
from tailrace.reporting.sinks import read_jsonl
from tailrace.reporting.summary import EvaluationSummary, LedgerSummary

_FRESH, _ALL = "training/logprob_difference_fresh", "training/logprob_difference"
MISMATCH_NATS = {_FRESH: 0.1, _ALL: 2.0}
"""Highest mean differences of log-probabilities that numerics (bfloat16 costs a few hundredths) and, over tokens of all
versions, some steps of training explain: a policy that finds its way of answering within ten steps moves by 1.0."""
_CONFIRMED_STEPS = 8
"""Steps for which fresh tokens vouch that both sides hold the same weights: a fast policy moves by more than 2."""
MISMATCH_CAUSES = {
    _FRESH: "the generator holds other weights, or computes with them otherwise",
    _ALL: "the generator holds other weights, or steps move the policy that far (lower "
    "trainer.learning_rate, or raise trainer.warmup_steps)",
}
_LAST_STEPS = 8
"""Of the last reward, at most."""
_AT_ONCE = 0.1
"""Of a mean step's time: two that end within it were told of at once, and the time between them is nobody's."""
CURVES = ("training/kl", "training/entropy", "training/grad_norm")
"""Metrics whose course the live view draws, beside the reward."""


class RunTotals:
    """What the lines so far come to. Each metric is reduced over the run as the table reduces it over a step.

    >>> totals = RunTotals()
    >>> totals.add({"step": 1, "wall_s": 2.0, "policy/version": 1, "batch/loss_tokens": 90, "bias/wasted_tokens": 7})
    >>> totals.add({"step": 2, "wall_s": 3.5, "policy/version": 2, "batch/loss_tokens": 80, "bias/wasted_tokens": 1})
    >>> totals.tokens_trained, totals.sum("bias/wasted_tokens"), totals.wall_s
    (170, 8.0, 3.5)
    """

    def __init__(self, lines: Iterable[Mapping[str, Json]] = ()) -> None:
        self.steps = 0
        """Lines of steps, skipped ones among them."""
        self.step = 0
        """Of the newest of those lines."""
        self.wall_s = 0.0
        """From the first rollout to the last step, the time between two starts left out."""
        self.clock_s = 0.0
        """That of the newest line, evaluations included: a resumed run's clock goes on from it."""
        self.tokens_trained = 0
        """Those that bore loss, of steps that were not skipped."""
        self.rollouts_trained = 0
        self.staleness_max = 0
        self.mismatch: str | None = None
        """The metric by which trainer and generator disagree in the newest step."""
        self.mismatched_steps = 0
        self.rewards = Curve()
        """One mean per step, like the rates below."""
        self._last_rewards: deque[tuple[float, float]] = deque(maxlen=_LAST_STEPS)
        """Mean and number of rollouts, of the newest steps that have a mean."""
        self._reward_steps = 0
        self.generation_tokens_per_s = Curve()
        self.training_tokens_per_s = Curve()
        """Of tokens that bore loss; steps that were told of at once are one."""
        self._unrated_tokens, self._rated_s = 0, 0.0
        self.curves: defaultdict[str, Curve] = defaultdict(Curve)
        """Values of `CURVES`, one per step."""
        self.evaluations: dict[str, EvaluationSummary] = {}
        """The course of the evaluations beside training, by environment."""
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._staleness_sum = 0.0
        self._unconfirmed_steps = 0
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Json]) -> None:
        """A line was written: of a step, of an evaluation, or of what came after the last step."""
        metrics = {name: float(value) for name, value in line.items() if _is_finite(value)}
        for name, value in metrics.items():
            self._reduce(name, value)
        if "policy/version" in metrics:
            self._add_step(metrics, is_trained=not metrics.get("policy/skipped_steps"))
        self.clock_s = max(self.clock_s, metrics.get("wall_s", 0.0))
        for environment in evaluated_environments(metrics):
            before = self.evaluations.get(environment)
            self.evaluations[environment] = with_evaluation(before, metrics, environment)

    def sum(self, name: str) -> float:
        """Of a metric that is summed, or of all of a family: `cpu/`."""
        if not name.endswith("/"):
            return self._sums.get(name, 0.0)
        return sum(value for summed, value in self._sums.items() if summed.startswith(name))

    def max(self, name: str) -> float:
        """Of a metric of which the highest counts; 0 before there is one."""
        return self._maxima.get(name, 0.0)

    def counts(self) -> dict[str, float]:
        """The newest value of each metric that counts since the run began."""
        return {name: value for name, value in self._newest.items() if _reduction(name) is Reduction.TOTAL}

    def peak_rss_bytes(self) -> dict[str, int]:
        """Highest resident memory, by role."""
        first, last = "memory/", "_rss_bytes"
        peaks = {name: value for name, value in self._maxima.items() if name.startswith(first) and name.endswith(last)}
        return {name.removeprefix(first).removesuffix(last): int(value) for name, value in peaks.items()}

    @property
    def policy_version(self) -> int:
        """After the newest step."""
        return int(self._newest.get("policy/version", 0))

    @property
    def skipped_steps(self) -> int:
        """Those that changed no weight."""
        return int(self.sum("policy/skipped_steps"))

    @property
    def staleness_mean(self) -> float:
        """Over tokens that bore loss."""
        return self._staleness_sum / max(1, self.tokens_trained)

    @property
    def reward_last_steps(self) -> int:
        """Of how many steps `reward_last` is: the last quarter of them, 8 at most, and one at least; 0 without any."""
        return min(self._reward_steps, max(1, min(_LAST_STEPS, self._reward_steps // 4)))

    @property
    def reward_last(self) -> float | None:
        """Mean over the rollouts of the last steps.

        One alone would read low at the end of a run: groups whose rewards are all equal count in the step in whose time
        they ended, and while the last batches are trained nothing is sampled any more.
        """
        newest = [*self._last_rewards][-self.reward_last_steps :]
        rollouts = sum(weight for _, weight in newest)
        return sum(mean * weight for mean, weight in newest) / rollouts if rollouts else None

    def ratios(self) -> dict[str, float]:
        """The biases of asynchrony over the run, by their metrics' names; absent while they are unknown.

        Both length ratios are of the same rollouts: those that finished after the first step and have ended since.
        """
        ended, trained = self.sum("bias/ended_rollouts"), self.sum("bias/trained_rollouts")
        ratios = {}
        if trained and self.sum("bias/ended_tokens"):
            mean_length = self.sum("bias/ended_tokens") / ended
            ratios["bias/length_ratio"] = self.sum("bias/trained_tokens") / trained / mean_length
            ratios["bias/loss_length_ratio"] = self.sum("bias/loss_tokens") / trained / mean_length
        if tokens := self.sum("batch/tokens"):
            ratios["bias/masked_share"] = self.sum("batch/masked_tokens") / tokens
        return ratios

    def ledger(self) -> LedgerSummary:
        """Every rollout up to the newest line."""
        by_reason = {str(state): self._reasons(state) for state in TerminalState if state is not TerminalState.TRAINED}
        by_state = {state: sum(reasons.values()) for state, reasons in by_reason.items()}
        by_state[str(TerminalState.TRAINED)] = self.rollouts_trained
        terminal = sum(by_state.values())
        admitted = max(terminal, int(self._newest.get("scheduler/admitted", 0)))
        return LedgerSummary(admitted=admitted, in_flight=admitted - terminal, by_state=by_state, by_reason=by_reason)

    def _reasons(self, state: TerminalState) -> dict[str, int]:
        prefix = f"rollout/{state}/"
        return {name.removeprefix(prefix): int(count) for name, count in self._sums.items() if name.startswith(prefix)}

    def _reduce(self, name: str, value: float) -> None:
        match _reduction(name):
            case Reduction.SUM:
                self._sums[name] += value
            case Reduction.MAX:
                self._maxima[name] = max(value, self._maxima.get(name, value))
            case Reduction.LAST | Reduction.TOTAL:
                self._newest[name] = value

    def _add_step(self, metrics: Mapping[str, float], *, is_trained: bool) -> None:
        loss_tokens, wall_s = int(metrics.get("batch/loss_tokens", 0)), metrics.get("wall_s", self.wall_s)
        self.steps += 1
        self.step = int(metrics.get("step", self.step))
        if is_trained:
            self.tokens_trained += loss_tokens
            self._staleness_sum += metrics.get("staleness/mean", 0.0) * loss_tokens
            self.staleness_max = max(self.staleness_max, int(metrics.get("staleness/max", 0)))
        self.rollouts_trained += int(metrics.get("rollout/trained", 0))
        is_confirmed = metrics.get(_FRESH, math.inf) <= MISMATCH_NATS[_FRESH]
        self._unconfirmed_steps = 0 if is_confirmed else self._unconfirmed_steps + 1
        self.mismatch = mismatch_in(metrics, self._unconfirmed_steps)
        self.mismatched_steps += self.mismatch is not None
        if "reward/mean" in metrics:
            self.rewards.add(metrics["reward/mean"])
            self._reward_steps += 1
            self._last_rewards.append((metrics["reward/mean"], max(1.0, _rewarded(metrics))))
        for name in CURVES:
            if name in metrics:
                self.curves[name].add(metrics[name])
        self.generation_tokens_per_s.add(metrics.get("generation/tokens_per_s", 0.0))
        self.wall_s = wall_s
        if is_trained:
            self._add_rate(loss_tokens)

    def _add_rate(self, loss_tokens: int) -> None:
        """Of training, up to a step that was just trained."""
        self._unrated_tokens += loss_tokens
        passed_s = self.wall_s - self._rated_s
        if passed_s > _AT_ONCE * self.wall_s / self.steps:
            self.training_tokens_per_s.add(self._unrated_tokens / passed_s)
            self._unrated_tokens, self._rated_s = 0, self.wall_s


def _rewarded(metrics: Mapping[str, float]) -> float:
    """How many rollouts a step's mean reward is of."""
    filtered = sum(count for name, count in metrics.items() if name.startswith("rollout/filtered/"))
    return metrics.get("rollout/trained", 0.0) + filtered


def mismatch_in(metrics: Mapping[str, float], unconfirmed_steps: int) -> str | None:
    """The metric by which trainer and generator disagree in a step, so many after fresh tokens showed that they agree.

    >>> moved_far = {"training/logprob_difference": 2.5}
    >>> mismatch_in(moved_far, unconfirmed_steps=3), mismatch_in(moved_far, unconfirmed_steps=30)
    (None, 'training/logprob_difference')
    """
    judged = MISMATCH_NATS if unconfirmed_steps > _CONFIRMED_STEPS else [_FRESH]
    return next((name for name in judged if metrics.get(name, 0.0) > MISMATCH_NATS[name]), None)


def read_totals(metrics: Path) -> RunTotals:
    """Of the lines in a run's `metrics.jsonl`; nothing without the file. Takes seconds for long runs."""
    return RunTotals(read_jsonl(metrics))


@functools.cache
def _reduction(name: str) -> Reduction | None:
    """None for what is no metric: `step`, `wall_s`, and names of other versions."""
    if "/" not in name:  # to look for the nearest name would hold the event loop for 10 ms
        return None
    try:
        return metric_spec(name).reduction
    except ValueError:
        return None


def _is_finite(value: Json) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
