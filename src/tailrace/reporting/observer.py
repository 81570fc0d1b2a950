"""What the scheduler and the trainer report, as one line of metrics per step, readable rollouts, and a run's totals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.batching import FormedBatch
from tailrace.records import (
    Completion,
    Float32Array,
    GenerationRequest,
    Group,
    Outcome,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    TerminalState,
)
from tailrace.reporting.evaluation_figures import EVALUATED, evaluation_metrics, update_summary
from tailrace.reporting.gauges import Gauge, ProcessGauge, SchedulerGauge
from tailrace.reporting.logs import FILE_ONLY
from tailrace.reporting.metrics import StepMetrics
from tailrace.reporting.phase_report import phase_line
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.summary import EvaluationSummary, LedgerSummary, RunSummary
from tailrace.scheduling import Evaluation, Ledger, SchedulerObserver
from tailrace.tracing.phases import phase

_logger = logging.getLogger(__name__)

_phase_logger = logging.getLogger(FILE_ONLY)


@dataclass(slots=True)
class Totals:
    """Over the whole run."""

    tokens_generated: int = 0
    tokens_trained: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    lag_max_s: float = 0.0
    """Of the event loop, since the first rollout."""
    failures: Counter[str] = field(default_factory=Counter)
    """Rollouts that failed, by reason."""
    rewards: list[float] = field(default_factory=list)
    """One mean per step, like the rates below."""
    generation_tokens_per_s: list[float] = field(default_factory=list)
    training_tokens_per_s: list[float] = field(default_factory=list)

    @property
    def staleness_mean(self) -> float:
        """Over tokens that bore loss."""
        return self.staleness_sum / max(1, self.tokens_trained)


class GroupSink(Protocol):
    """Keeps scored groups: a capture."""

    def write(self, group: Group) -> None:
        """A group was scored. Never waits."""
        ...

    def step_ended(self) -> None:
        """What comes now is of the next step."""
        ...


class MetricsListener(Protocol):
    """Is told what `metrics.jsonl` says, as it is written. Returns at once and never raises."""

    def step_ended(self, metrics: StepMetrics) -> None:
        """A step was trained or skipped."""

    def evaluated(self, metrics: StepMetrics) -> None:
        """Held-out tasks were measured beside training."""


class RunObserver(SchedulerObserver):
    """Writes and counts what happens in a run. Everything here is O(rollouts); nothing waits for a disk.

    Make it, add gauges, `begin` when the first rollout is about to start.
    """

    def __init__(
        self,
        *,
        metrics: JsonlSink,
        rollouts: RolloutWriter,
        capture: GroupSink,
        listener: MetricsListener,
        release_payloads: Callable[[RolloutId], None],
    ) -> None:
        """`release_payloads` is called for every rollout that is terminal."""
        self.totals = Totals()
        self.latest: dict[str, float] = {}
        self.evaluations: dict[str, EvaluationSummary] = {}
        """The course of the evaluations beside training, by environment."""
        self._recorder = RunRecorder()
        self.bias = self._recorder.bias
        self._gauges: list[Gauge] = []
        self._sink, self._rollouts, self._capture, self._release = metrics, rollouts, capture, release_payloads
        self._listener = listener
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._last_step_s = self._clock()
        self._tokens_before = 0
        self._advantages: dict[RolloutId, float] = {}
        self._lost: dict[RolloutId, Rollout] = {}
        """Rollouts that never finished and are not terminal yet."""
        self._told: set[tuple[str, str]] = set()
        """(environment, reason) of failures whose first one is in the log."""
        self._entries: list[RolloutEntry] = []

    def add_gauges(self, *gauges: Gauge) -> None:
        """From now on each step's line holds what these read as well."""
        self._gauges += gauges

    def begin(self) -> None:
        """The first rollout is about to start: the first step is not charged for what came before."""
        for gauge in self._gauges:
            gauge()
        self._recorder.flush()
        self._started_s = self._last_step_s = self._clock()

    @property
    def wall_s(self) -> float:
        """From the first rollout to the last step."""
        return self._last_step_s - self._started_s

    def completion_sampled(self, completion: Completion) -> None:
        """A request of some rollout ended."""
        self._recorder.completion(completion)

    @override
    def rollout_finished(self, rollout: Rollout) -> None:
        self.totals.tokens_generated += rollout.num_completion_tokens
        self._recorder.rollout_finished(rollout)

    def request_cancelled(self, request: GenerationRequest, tokens: int) -> None:
        """A request was cancelled with `tokens` sampled; requests without an owner are not counted."""
        if request.owner is not None and tokens:
            self._recorder.bias.cut(request.owner, tokens)

    def rollout_lost(self, rollout: Rollout) -> None:
        """A rollout failed or was cancelled: what it sampled is wasted, unless the end of the run cancelled it.

        Comes after `request_cancelled` for the completion that it was waiting for.
        """
        self.totals.tokens_generated += self._recorder.bias.losing(rollout)
        self._lost[rollout.rollout_id] = rollout

    @override
    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        self._release(rollout_id)
        self._recorder.rollout_ended(rollout_id, rollout, outcome)
        known = rollout or self._lost.pop(rollout_id, None)
        has_failed = outcome.state is TerminalState.FAILED
        if has_failed:
            self._count_failure(known, outcome.reason, message)
        if known is not None and (rollout is not None or has_failed):
            advantage = self._advantages.pop(rollout_id, None)
            self._entries.append(RolloutEntry(known, outcome, advantage, message))

    def _count_failure(self, rollout: Rollout | None, reason: str, message: str) -> None:
        """Count it. The first of its environment and reason is told, with its traceback; `rollout` may be unknown."""
        self.totals.failures[reason] += 1
        environment = "" if rollout is None else rollout.task.environment
        if rollout is not None:
            self._recorder.add(f"environment/{environment}/failed/{reason}", 1)
        if (environment, reason) not in self._told:
            self._told.add((environment, reason))
            _logger.warning("a rollout failed, and more of %r are only counted: %s", reason, message)

    @override
    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        self._recorder.group_scored(group)
        self._capture.write(group)
        for rollout, advantage in zip(group.rollouts, group.advantages or (), strict=False):
            self._advantages[rollout.rollout_id] = _mean_advantage(advantage)

    @override
    def part_released(self, part: Group) -> None:
        for rollout, advantage in zip(part.rollouts, part.advantages or (), strict=True):
            self._advantages[rollout.rollout_id] = _mean_advantage(advantage)

    @override
    def batch_sent(self, formed: FormedBatch) -> None:
        """Counts nothing: a batch is counted when its step ends."""

    @override
    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        with phase("record"):
            self._record_step(event, formed)

    def _record_step(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        now, summary, totals = self._clock(), formed.batch.summary, self.totals
        elapsed_s = max(now - self._last_step_s, 1e-9)
        self._recorder.batch_sent(summary)
        if isinstance(event, StepTrained):
            self._recorder.update(event.metrics)
            totals.tokens_trained += summary.loss_tokens
            totals.staleness_sum += summary.staleness_mean * summary.loss_tokens
            totals.staleness_max = max(totals.staleness_max, summary.staleness_max)
        rate = (totals.tokens_generated - self._tokens_before) / elapsed_s
        self._tokens_before = totals.tokens_generated
        self._recorder.add("generation/tokens_per_s", rate)
        self._recorder.add("policy/version", event.version)
        self._recorder.add("sinks/dropped_records", self._sink.lost_records)
        for gauge in self._gauges:
            self._recorder.update(gauge())
        self.latest = self._recorder.flush()
        totals.lag_max_s = max(totals.lag_max_s, self.latest.get("lag/max_s", 0.0))
        totals.generation_tokens_per_s.append(rate)
        totals.training_tokens_per_s.append(summary.loss_tokens / elapsed_s)
        if "reward/mean" in self.latest:
            totals.rewards.append(self.latest["reward/mean"])
        told = StepMetrics(event.step, now - self._started_s, self.latest)
        self._sink.write(told.line())
        self._listener.step_ended(told)
        self._rollouts.write(event.step, self._entries)
        self._entries = []
        self._last_step_s = now
        self._capture.step_ended()
        _phase_logger.info("step %d: %s", event.step, phase_line(self.latest))

    def weights_installed(self, duration_s: float) -> None:
        """The generator serves newer weights, `duration_s` after they were published."""
        self._recorder.add("generation/load_model_state_dict_s", duration_s)

    def weights_not_installed(self) -> None:
        """The generator could not take newer weights, and goes on with the old ones."""
        self._recorder.add("generation/failed_loads", 1)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Held-out tasks were measured beside training: a line of metrics and a file of rollouts of their own."""
        told = StepMetrics(evaluation.step, self._clock() - self._started_s, evaluation_metrics(evaluation))
        self._sink.write(told.line())
        self._listener.evaluated(told)
        rollouts = [rollout for result in evaluation.results.values() for rollout in result.rollouts]
        self._rollouts.write_evaluation(evaluation.step, [RolloutEntry(rollout, EVALUATED) for rollout in rollouts])
        for environment in evaluation.results:
            course = update_summary(self.evaluations.get(environment), evaluation, environment)
            if course is not None:
                self.evaluations[environment] = course
                _logger.info("held-out %s: %s", environment, course.line())
            if lost := evaluation.results[environment].failed:
                reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
                _logger.warning("held-out %s, step %d: rollouts lost: %s", environment, evaluation.step, reasons)

    def write_rest(self, step: int) -> None:
        """At the end: rollouts that ended since the last step go to the file of the step that never was."""
        self._rollouts.write(step + 1, self._entries)
        self._entries = []


def _mean_advantage(advantage: float | Float32Array) -> float:
    """Over its tokens, where it has one for each."""
    return float(advantage.mean()) if isinstance(advantage, np.ndarray) else float(advantage)


def with_figures(
    summary: RunSummary,
    ledger: Ledger,
    observer: RunObserver,
    *,
    waits: SchedulerGauge,
    processes: ProcessGauge,
) -> RunSummary:
    """The summary with the figures of a run whose rollouts began, once its ledger is closed."""
    totals, bias, rewards = observer.totals, observer.bias, observer.totals.rewards
    cpu_s, waited_s = processes.cpu_s, waits.newest.waited_s
    return msgspec.structs.replace(
        summary,
        ledger=LedgerSummary(
            admitted=ledger.admitted,
            in_flight=ledger.in_flight,
            by_state={str(state): ledger.total(state) for state in TerminalState},
            by_reason={str(state): ledger.reasons(state) for state in TerminalState if state != TerminalState.TRAINED},
        ),
        cpu_s=cpu_s,
        peak_rss_bytes=processes.peak_rss_bytes,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        reward_best=max(rewards, default=None),
        evaluations=dict(observer.evaluations),
        tokens_generated=totals.tokens_generated,
        tokens_trained=totals.tokens_trained,
        generation_tokens_per_s=_per(totals.tokens_generated, observer.wall_s),
        training_tokens_per_s=_per(totals.tokens_trained, observer.wall_s),
        tokens_per_cpu_s=_per(totals.tokens_trained, cpu_s),
        length_ratio=bias.length_ratio,
        loss_length_ratio=bias.loss_length_ratio,
        wasted_tokens=bias.wasted_tokens,
        masked_tokens=bias.masked_tokens,
        masked_share=bias.masked_share,
        staleness_mean=totals.staleness_mean if totals.tokens_trained else None,
        staleness_max=totals.staleness_max if totals.tokens_trained else None,
        trainer_wait_s=waits.newest.trainer_waited_s,
        admission_waits_s={str(cause): seconds for cause, seconds in waited_s.items() if seconds > 0},
        loop_lag_max_s=totals.lag_max_s,
    )


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
