"""What the scheduler and the trainer report, as one line of metrics per step, readable rollouts, and a run's totals."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from typing_extensions import override

from tailrace.batching import FormedBatch
from tailrace.records import (
    NOTHING_TRAINABLE,
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
from tailrace.reporting.advice import HISTORY, Advice, advice
from tailrace.reporting.evaluation_figures import EVALUATED, evaluation_metrics
from tailrace.reporting.gauges import WAITS, Gauge
from tailrace.reporting.logs import FILE_ONLY
from tailrace.reporting.metrics import StepMetrics
from tailrace.reporting.phase_report import phase_line
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.summary import LedgerSummary, RunSummary
from tailrace.reporting.tokens.writer import TokenWriter
from tailrace.reporting.totals import MISMATCH_CAUSES, MISMATCH_NATS, RunTotals
from tailrace.reporting.trackers.hub import Trackers
from tailrace.scheduling import Evaluation, Ledger, SchedulerObserver
from tailrace.tracing.phases import phase

_logger = logging.getLogger(__name__)

_phase_logger = logging.getLogger(FILE_ONLY)

RESUMED = "resumed"
"""Reason for rollouts that were in flight at the step that a run was resumed from."""


@dataclass(frozen=True, slots=True)
class EarlierStarts:
    """Of the run that goes on: none, for one that begins."""

    totals: RunTotals = field(default_factory=RunTotals)
    """What they came to, as far as their steps survive."""
    starts: int = 0
    wall_s: float = 0.0
    """What they took, start-up and shutdown included as far as that is known; never less than the metrics' clock."""


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
        tokens: TokenWriter,
        capture: GroupSink,
        listener: MetricsListener,
        trackers: Trackers,
        submit: Callable[[Callable[[], None]], bool],
        release_payloads: Callable[[RolloutId], None],
    ) -> None:
        """`submit` has a thread do what takes longer; `release_payloads` is called for every rollout that is over."""
        self.totals = RunTotals()
        """Of all starts of the run."""
        self.latest: dict[str, float] = {}
        """The line of the newest step."""
        self.advice: list[Advice] = []
        """What is wrong by the newest steps."""
        self._recent: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self.sample: Rollout | None = None
        """One that the newest step was trained on, to be looked at."""
        self.starts = 1
        self.earlier_s = 0.0
        """The metrics' clock where the run's earlier starts left it."""
        self.earlier_wall_s = 0.0
        """What those took."""
        self.counts_before: dict[str, int] = {}
        """What they brought the counts since the run began to, by metric."""
        self._ledger_before = LedgerSummary()
        self._recorder = RunRecorder()
        self._gauges: list[Gauge] = []
        self._sink, self._rollouts, self._tokens = metrics, rollouts, tokens
        self._capture, self._release = capture, release_payloads
        self._listener, self._trackers, self._submit = listener, trackers, submit
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._last_step_s = self._clock()
        self._generated_tokens = 0
        """Of rollouts that ended since the last step."""
        self._advantages: dict[RolloutId, float | Float32Array] = {}
        self._lost: dict[RolloutId, tuple[Rollout, int]] = {}
        """Rollouts that never finished and are not terminal yet, with the tokens that were sampled for each."""
        self._reported: set[tuple[str, str]] = set()
        """(environment, reason) of failures whose first one is in the log."""
        self._skipped: set[str] = set()
        """Reasons for skipped steps whose first one is in the log."""
        self._entries: list[RolloutEntry] = []

    def add_gauges(self, *gauges: Gauge) -> None:
        """From now on each step's line holds what these read as well."""
        self._gauges += gauges

    def begin(self, earlier: EarlierStarts) -> None:
        """The first rollout is about to start: the first step is not charged for what came before.

        The totals go on from what earlier starts came to.
        """
        for gauge in self._gauges:
            gauge()
        self._recorder.flush()
        self._started_s = self._last_step_s = self._clock()
        self.totals, self.starts = earlier.totals, earlier.starts + 1
        self.earlier_s, self.earlier_wall_s = earlier.totals.clock_s, earlier.wall_s
        self.counts_before = {name: int(count) for name, count in self.totals.counts().items()}
        self._ledger_before = self.totals.ledger()
        if self.totals.steps:
            self._recorder.bias.skip_warmup()
        if lost := self._ledger_before.in_flight:
            cancelled = str(TerminalState.CANCELLED)
            self._ledger_before += LedgerSummary(
                in_flight=-lost, by_state={cancelled: lost}, by_reason={cancelled: {RESUMED: lost}}
            )
            self._recorder.add(f"rollout/{cancelled}/{RESUMED}", lost)

    def tally(self, ledger: Ledger) -> LedgerSummary:
        """Every rollout of all starts; `ledger` is that of this one."""
        return self._ledger_before + LedgerSummary.of(ledger)

    def completion_sampled(self, completion: Completion) -> None:
        """A request of some rollout ended."""
        self._recorder.completion(completion)

    @override
    def rollout_finished(self, rollout: Rollout) -> None:
        self._generated_tokens += rollout.num_completion_tokens
        self._recorder.rollout_finished(rollout)

    def request_cancelled(self, request: GenerationRequest, tokens: int) -> None:
        """A request was cancelled with `tokens` sampled; requests without an owner are not counted."""
        if request.owner is not None and tokens:
            self._recorder.bias.cut(request.owner, tokens)

    def held_out_ended(self, rollout_id: RolloutId) -> None:
        """The agent of a rollout that belongs to an evaluation has returned, which no figure of training counts."""
        self._release(rollout_id)
        self._recorder.bias.forget_cut(rollout_id)

    def rollout_lost(self, rollout: Rollout) -> None:
        """A rollout failed or was cancelled: what it sampled is wasted, unless the end of the run cancelled it.

        Comes after `request_cancelled` for the completion that it was waiting for.
        """
        tokens = self._recorder.bias.losing(rollout)
        self._generated_tokens += tokens
        self._lost[rollout.rollout_id] = rollout, tokens

    @override
    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        self._release(rollout_id)
        self._recorder.rollout_ended(rollout_id, rollout, outcome)
        known, tokens = self._lost.pop(rollout_id, (None, 0))
        if rollout is not None:
            known, tokens = rollout, rollout.num_completion_tokens
        if known is not None:
            self._recorder.tokens_dropped(known, tokens, outcome)
        has_failed = outcome.state is TerminalState.FAILED
        if has_failed:
            self._tell_failure(known, outcome.reason, message)
        if known is not None and (rollout is not None or has_failed):
            advantage = self._advantages.pop(rollout_id, None)
            self._entries.append(RolloutEntry(known, outcome, advantage, message))

    def _tell_failure(self, rollout: Rollout | None, reason: str, message: str) -> None:
        """The first of its environment and reason is told, with its traceback; `rollout` may be unknown."""
        environment = "" if rollout is None else rollout.task.environment
        if rollout is not None:
            self._recorder.add(f"environment/{environment}/failed/{reason}", 1)
        if (environment, reason) not in self._reported:
            self._reported.add((environment, reason))
            _logger.warning("a rollout failed, and more of %r are only counted: %s", reason, message)

    @override
    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        self._recorder.group_scored(group)
        self._capture.write(group)
        for rollout, advantage in zip(group.rollouts, group.advantages or (), strict=False):
            self._advantages[rollout.rollout_id] = advantage

    @override
    def part_released(self, part: Group) -> None:
        for rollout, advantage in zip(part.rollouts, part.advantages or (), strict=True):
            self._advantages[rollout.rollout_id] = advantage

    @override
    def batch_sent(self, formed: FormedBatch) -> None:
        """Counts nothing: a batch is counted when its step ends."""

    @override
    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        with phase("record", about={"step": event.step}):
            self._record_step(event, formed)

    def _record_step(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        now = self._clock()
        rate = self._generated_tokens / max(now - self._last_step_s, 1e-9)
        self._recorder.step_ended(formed.batch.summary, formed.groups)
        if isinstance(event, StepTrained):
            self._recorder.update(event.metrics)
        else:
            self._tell_skipped(event)
        self._recorder.add("generation/tokens_per_s", rate)
        self._recorder.add("policy/version", event.version)
        self._recorder.add("policy/skipped_steps", float(isinstance(event, StepSkipped)))
        for gauge in self._gauges:
            self._recorder.update(gauge())
        self.latest = self._taken_in(event.step, now, self._flush()) | self.totals.ratios()
        self._recent.append(self.latest)
        self.advice = advice(self._recent)
        self._watch_mismatch(event.step)
        self._sink.write(self.latest)
        self._listener.step_ended(StepMetrics.of(self.latest))
        self._trackers.logged(self.latest)
        self._trackers.ended(event.step, self._entries, self._submit)
        trained = (entry.rollout for entry in self._entries if entry.outcome.state is TerminalState.TRAINED)
        self.sample = next(trained, self.sample)
        self._rollouts.write(event.step, self._entries)
        if self._tokens.wants(event.step):
            samples = (sample for group in formed.groups for sample in group.samples)
            oldest = {sample.rollout_id: sample.oldest_version for sample in samples}
            self._tokens.write(event.step, self._entries, oldest)
        self._entries = []
        self._last_step_s = now
        self._capture.step_ended()
        _phase_logger.info("step %d: %s", event.step, phase_line(self.latest))

    def _tell_skipped(self, event: StepSkipped) -> None:
        """The first of its reason."""
        if event.reason not in self._skipped:
            self._skipped.add(event.reason)
            says_all = event.reason == NOTHING_TRAINABLE
            _logger.warning(
                "step %d was skipped, and more of %r are only counted: it changed no weight, and its rollouts are "
                "filtered%s",
                *(event.step, event.reason, "" if says_all else "; the trainer's log says why"),
            )

    def _watch_mismatch(self, step: int) -> None:
        """Raise the alarm where the trainer does not find the log-probabilities that tokens were sampled with."""
        metric, steps = self.totals.mismatch, self.totals.mismatched_steps
        if metric is not None and steps.bit_count() == 1:  # the first, second, fourth, eighth, ...
            _logger.error(
                "ALARM: in step %d the trainer's log-probabilities differ from the generator's by %.3g nats on average "
                "(%s, at most %g; %d steps so far): %s",
                *(step, self.latest[metric], metric, MISMATCH_NATS[metric], steps, MISMATCH_CAUSES[metric]),
            )

    def weights_installed(self, duration_s: float) -> None:
        """The generator serves newer weights, `duration_s` after they were published."""
        self._recorder.add("generation/load_model_state_dict_s", duration_s)

    def weights_not_installed(self) -> None:
        """The generator could not take newer weights, and goes on with the old ones."""
        self._recorder.add("generation/failed_loads", 1)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Held-out tasks were measured beside training: a line of metrics and a file of rollouts of their own."""
        line = self._taken_in(evaluation.step, self._clock(), evaluation_metrics(evaluation))
        self._sink.write(line)
        self._listener.evaluated(StepMetrics.of(line))
        self._trackers.logged(line)
        rollouts = [rollout for result in evaluation.results.values() for rollout in result.rollouts]
        entries = [RolloutEntry(rollout, EVALUATED) for rollout in rollouts]
        self._rollouts.write_evaluation(evaluation.step, entries)
        self._tokens.write_evaluation(evaluation.step, entries)
        for environment in evaluation.results:
            if (course := self.totals.evaluations.get(environment)) is not None:
                _logger.info("held-out %s: %s", environment, course.line())
            if lost := evaluation.results[environment].failed:
                reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
                _logger.warning("held-out %s, step %d: rollouts lost: %s", environment, evaluation.step, reasons)

    def checkpoint_written(self, step: int, path: str) -> None:
        """A checkpoint that contains the step is durable."""
        self._trackers.checkpoint_written(step, path)

    def write_rest(self, step: int) -> None:
        """At the end: rollouts that ended since the last step go to the file of the step that never was."""
        self._rollouts.write(step + 1, self._entries)
        if self._tokens.wants(step + 1):
            self._tokens.write(step + 1, self._entries, {})
        self._entries = []
        self.totals.add(self._flush())

    def _flush(self) -> dict[str, float]:
        """The metrics since the last step."""
        self._recorder.add("rollout/generated_tokens", self._generated_tokens)
        self._generated_tokens = 0
        return self._recorder.flush()

    def _taken_in(self, step: int, now: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """A line of `metrics.jsonl`, whose counts are of all starts; the totals have it now."""
        counts = {name: metrics[name] + count for name, count in self.counts_before.items() if name in metrics}
        line = {"step": step, "wall_s": self.earlier_s + now - self._started_s, **metrics, **counts}
        self.totals.add(line)
        return line


def with_figures(summary: RunSummary, totals: RunTotals, ledger: LedgerSummary) -> RunSummary:
    """The summary with the figures of a run whose rollouts began, now or in an earlier start; its ledger is closed."""
    ratios, rewards = totals.ratios(), totals.rewards
    generated = int(totals.sum("rollout/generated_tokens"))
    cpu_s = None if totals.max("cpu/elsewhere") else totals.sum("cpu/") or None
    waits = {str(cause): totals.sum(f"scheduler/{name}") for cause, name in WAITS.items()}
    return msgspec.structs.replace(
        summary,
        steps=summary.steps or totals.step,
        policy_version=summary.policy_version or totals.policy_version,
        ledger=ledger,
        cpu_s=cpu_s,
        peak_rss_bytes=totals.peak_rss_bytes(),
        reward_first=rewards.first,
        reward_last=totals.reward_last,
        reward_last_steps=totals.reward_last_steps,
        reward_best=rewards.highest if rewards.points else None,
        evaluations=dict(totals.evaluations),
        tokens_generated=generated,
        tokens_trained=totals.tokens_trained,
        generation_tokens_per_s=_per(generated, totals.wall_s),
        training_tokens_per_s=_per(totals.tokens_trained, totals.wall_s),
        tokens_per_cpu_s=None if cpu_s is None else _per(totals.tokens_trained, cpu_s),
        skipped_steps=totals.skipped_steps,
        mismatched_steps=totals.mismatched_steps,
        length_ratio=ratios.get("bias/length_ratio"),
        loss_length_ratio=ratios.get("bias/loss_length_ratio"),
        wasted_tokens=int(totals.sum("bias/wasted_tokens")),
        masked_tokens=int(totals.sum("batch/masked_tokens")),
        masked_share=ratios.get("bias/masked_share"),
        staleness_mean=totals.staleness_mean if totals.tokens_trained else None,
        staleness_max=totals.staleness_max if totals.tokens_trained else None,
        trainer_wait_s=totals.sum("scheduler/trainer_wait_s"),
        admission_waits_s={cause: waited_s for cause, waited_s in waits.items() if waited_s > 0},
        loop_lag_max_s=totals.max("lag/max_s"),
    )


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
