"""Writes what the scheduler and the trainer report, one line of metrics per step, and keeps the run's totals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tailrace.batching import FormedBatch
from tailrace.generation.router.replica import ReplicaFigures
from tailrace.lifecycle.trimming import MemoryTrimmer
from tailrace.records import (
    Completion,
    GenerationRequest,
    Group,
    Outcome,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    TerminalState,
)
from tailrace.replay.capture import CaptureWriter
from tailrace.reporting.evaluation_figures import evaluation_entries, evaluation_metrics, followed
from tailrace.reporting.logs import FILE_ONLY
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.reporting.phase_report import phase_line
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.summary import EvaluationSummary
from tailrace.reporting.usage import ProcessMeter, total_cpu_s
from tailrace.rollouts.scoring.judge import JudgeUsage
from tailrace.scheduling import EnvironmentFigures, Evaluation, SchedulerStatistics, Verdict
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.phases import PhaseRecorder, phase
from tailrace.transport.payloads.accounts import PayloadAccounts, PayloadFigures

_logger = logging.getLogger(__name__)

_phase_logger = logging.getLogger(FILE_ONLY)

_WAITS = {
    Verdict.BUDGET_SPENT: "budget_wait_s",
    Verdict.BUFFER_FULL: "buffer_wait_s",
    Verdict.WEIGHTS_OLD: "weights_wait_s",
    Verdict.STEP_STARTED: "edge_wait_s",
}


@dataclass(slots=True)
class Totals:
    """Over the whole run."""

    tokens_generated: int = 0
    tokens_trained: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    lag_max_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def staleness_mean(self) -> float:
        """Over tokens that bore loss."""
        return self.staleness_sum / max(1, self.tokens_trained)


@dataclass(slots=True)
class History:
    """One value per step, for the live view."""

    rewards: list[float] = field(default_factory=list)
    generation_tokens_per_s: list[float] = field(default_factory=list)
    training_tokens_per_s: list[float] = field(default_factory=list)


class RunObserver:
    """The scheduler's observer. Everything here is O(rollouts); nothing waits for a disk."""

    def __init__(
        self,
        *,
        metrics: JsonlSink,
        rollouts: RolloutWriter,
        lag: LoopLagMonitor,
        phases: PhaseRecorder,
        capture: CaptureWriter,
        trimmer: MemoryTrimmer,
        meter: ProcessMeter,
        statistics: Callable[[], SchedulerStatistics],
        replicas: Callable[[], list[ReplicaFigures]],
        environments: Callable[[], Mapping[str, EnvironmentFigures]],
        judge_usage: Callable[[], JudgeUsage],
        payloads: PayloadAccounts | None = None,
    ) -> None:
        self.totals, self.history = Totals(), History()
        self.latest: dict[str, float] = {}
        self.evaluations: dict[str, EvaluationSummary] = {}
        """The course of the evaluations beside training, by environment."""
        self._metrics = MetricsAccumulator()
        self._recorder = RunRecorder(self._metrics)
        self.bias = self._recorder.bias
        self._sink, self._rollouts = metrics, rollouts
        self._phases, self._capture, self._trimmer = phases, capture, trimmer
        self._lag, self._meter, self._statistics, self._replicas = lag, meter, statistics, replicas
        self._environments = environments
        self._judge_usage, self._judged = judge_usage, JudgeUsage()
        self._payloads, self._payloads_before = payloads, PayloadFigures()
        self._clock = asyncio.get_running_loop().time
        self.started_s = self.last_step_s = self._clock()
        self._phases.flush()  # the first step is not charged for the start
        self._usage = meter.read()
        self._cpu_before_s = total_cpu_s(self._usage)
        self._waited_s: Mapping[Verdict, float] = dict.fromkeys(Verdict, 0.0)
        self._trainer_waited_s = self._held_s = 0.0
        self._tokens_before = 0
        self._advantages: dict[RolloutId, float] = {}
        self._entries: list[RolloutEntry] = []

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes from the first rollout to the last step."""
        return total_cpu_s(self._usage) - self._cpu_before_s

    @property
    def wall_s(self) -> float:
        """From the first rollout to the last step."""
        return self.last_step_s - self.started_s

    @property
    def waited_s(self) -> Mapping[Verdict, float]:
        """Seconds that admission was held until the last step, by what held it."""
        return self._waited_s

    @property
    def trainer_waited_s(self) -> float:
        """Seconds that the trainer waited for a batch until the last step, the first one included."""
        return self._trainer_waited_s

    def completion_sampled(self, completion: Completion) -> None:
        """A request of some rollout ended."""
        self._recorder.completion(completion)

    def rollout_finished(self, rollout: Rollout) -> None:
        """See `SchedulerObserver`."""
        self.totals.tokens_generated += rollout.num_completion_tokens
        self._recorder.rollout_finished(rollout)

    def request_cancelled(self, request: GenerationRequest, tokens: int) -> None:
        """A request was cancelled with so many tokens sampled; others than those of rollouts are nobody's loss here."""
        if request.owner is not None and tokens:
            self._recorder.bias.cut(request.owner, tokens)

    def rollout_lost(self, rollout: Rollout) -> None:
        """A rollout failed or was cancelled: what it sampled is wasted, unless the end of the run cancelled it.

        Comes after `request_cancelled` for the completion that it was waiting for.
        """
        self.totals.tokens_generated += self._recorder.bias.losing(rollout)

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        """See `SchedulerObserver`."""
        if self._payloads is not None:
            self._payloads.release(rollout_id)
        if outcome.state is TerminalState.FAILED:
            self.totals.failures[outcome.reason] += 1
            if self.totals.failures[outcome.reason] == 1:
                _logger.warning("a rollout failed, and more of %r are only counted: %s", outcome.reason, message)
        self._recorder.rollout_ended(rollout_id, rollout, outcome)
        if rollout is not None:
            self._entries.append(RolloutEntry(rollout, outcome, self._advantages.pop(rollout_id, None)))

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        """See `SchedulerObserver`."""
        self._recorder.group_scored(group)
        self._capture.write(group)
        for rollout, advantage in zip(group.rollouts, group.advantages or (), strict=False):
            self._advantages[rollout.rollout_id] = float(np.mean(advantage))

    def part_released(self, part: Group) -> None:
        """See `SchedulerObserver`."""
        for rollout, advantage in zip(part.rollouts, part.advantages or (), strict=True):
            self._advantages[rollout.rollout_id] = float(np.mean(advantage))

    def batch_sent(self, formed: FormedBatch) -> None:
        """See `SchedulerObserver`."""

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """See `SchedulerObserver`."""
        with phase("record"):
            self._record_step(event, formed)

    def _record_step(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        now, summary, totals = self._clock(), formed.batch.summary, self.totals
        elapsed_s = max(now - self.last_step_s, 1e-9)
        self._recorder.batch_sent(summary)
        if isinstance(event, StepTrained):
            self._metrics.update(event.metrics)
            totals.tokens_trained += summary.loss_tokens
            totals.staleness_sum += summary.staleness_mean * summary.loss_tokens
            totals.staleness_max = max(totals.staleness_max, summary.staleness_max)
        rate = (totals.tokens_generated - self._tokens_before) / elapsed_s
        self._tokens_before = totals.tokens_generated
        self._metrics.add("generation/tokens_per_s", rate)
        self._count_run(event.version)
        self.latest = self._recorder.flush()
        self.history.generation_tokens_per_s.append(rate)
        self.history.training_tokens_per_s.append(summary.loss_tokens / elapsed_s)
        if "reward/mean" in self.latest:
            self.history.rewards.append(self.latest["reward/mean"])
        self._sink.write({"step": event.step, "wall_s": now - self.started_s, **self.latest})
        self._rollouts.write(event.step, self._entries)
        self._entries = []
        self.last_step_s = now
        self._capture.step_ended()
        self._trimmer.step_ended()
        _phase_logger.info("step %d: %s", event.step, phase_line(self.latest))

    def weights_installed(self, duration_s: float) -> None:
        """The generator serves newer weights, `duration_s` after it was told of them."""
        self._metrics.add("generation/load_model_state_dict_s", duration_s)

    def weights_not_installed(self) -> None:
        """The generator could not take newer weights, and goes on with the old ones."""
        self._metrics.add("generation/failed_loads", 1)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Held-out tasks were measured beside training: a line of metrics and a file of rollouts of their own."""
        metrics = evaluation_metrics(evaluation)
        self._sink.write({"step": evaluation.step, "wall_s": self._clock() - self.started_s, **metrics})
        self._rollouts.write_evaluation(evaluation.step, evaluation_entries(evaluation))
        for environment in evaluation.results:
            course = followed(self.evaluations.get(environment), evaluation, environment)
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

    def _count_run(self, version: int) -> None:
        add, statistics = self._metrics.add, self._statistics()
        add("policy/version", version)
        add("scheduler/in_flight", statistics.in_flight)
        add("scheduler/admitted", statistics.admitted)
        add("scheduler/ready_groups", statistics.waiting_groups)
        add("scheduler/queued_batches", statistics.batches_ahead)
        add("scheduler/restarted_groups", statistics.restarted_groups)
        add("scheduler/set_aside", statistics.set_aside)
        for verdict, name in _WAITS.items():
            add(f"scheduler/{name}", statistics.waited_s[verdict] - self._waited_s[verdict])
        add("scheduler/trainer_wait_s", statistics.trainer_waited_s - self._trainer_waited_s)
        add("scheduler/held_s", statistics.held_s - self._held_s)
        self._waited_s, self._trainer_waited_s = statistics.waited_s, statistics.trainer_waited_s
        self._held_s = statistics.held_s
        for name, figures in self._environments().items():
            add(f"environment/{name}/trained_share", figures.trained_share)
            add(f"environment/{name}/in_flight", figures.in_flight)
            add(f"environment/{name}/trainable_share", figures.expected)
            add(f"environment/{name}/barren_tasks", figures.untrainable_tasks)
        for replica in self._replicas():
            self._metrics.update(replica.metrics())
        judged = self._judge_usage()
        if judged.calls:
            self._metrics.update(judged.since(self._judged).metrics("/"))
            self._judged = judged
        self._count_payloads()
        lag = self._lag.flush()
        self.totals.lag_max_s = max(self.totals.lag_max_s, lag.max_s)
        self._metrics.update(lag.metrics())
        for name, used in self._phases.flush().items():
            self._metrics.update(used.metrics(name))
        self._metrics.update(self._trimmer.flush())
        usage = self._meter.read()
        for role, process in usage.items():
            add(f"memory/{role}_rss_bytes", process.rss_bytes)
            add(f"cpu/{role}_s", process.cpu_s - (self._usage[role].cpu_s if role in self._usage else 0.0))
        self._usage = usage
        add("sinks/dropped_records", self._sink.lost_records)

    def _count_payloads(self) -> None:
        figures, before = self._payloads.figures if self._payloads else PayloadFigures(), self._payloads_before
        if figures.recorded_bytes:
            self._metrics.add("payloads/recorded_bytes", figures.recorded_bytes - before.recorded_bytes)
            self._metrics.add("payloads/released_bytes", figures.released_bytes - before.released_bytes)
            self._metrics.add("payloads/held_bytes", figures.held_bytes)
        self._payloads_before = figures
