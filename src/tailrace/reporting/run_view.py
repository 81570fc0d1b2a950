"""Snapshots of a training run, for the live view."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tailrace.records import Rollout, TerminalState
from tailrace.reporting.advice import Advice
from tailrace.reporting.curves import Curve
from tailrace.reporting.observer import RunObserver
from tailrace.reporting.phase_report import phase_costs
from tailrace.scheduling import Evaluator, Ledger, SchedulerStatistics, Verdict
from tailrace.tracing.lag import LagStatistics

_WAITING = {
    Verdict.BUDGET_SPENT: " (the staleness budget is spent)",
    Verdict.BUFFER_FULL: " (enough finished groups wait for it)",
    Verdict.TRANSPORT_AWAY: " (Redis is away)",
}


class Stage(enum.StrEnum):
    """Of a run."""

    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"
    EVALUATING = "evaluating"
    """Training is over; the last evaluation goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a person wants to see of a run right now. Cheap to make: take one four times a second."""

    name: str
    model: str = ""
    environments: Sequence[str] = ()
    stage: Stage = Stage.STARTING
    waiting_for: str = ""
    """What holds the run up, in plain words; empty while it flows."""
    elapsed_s: float = 0.0

    step: int = 0
    """Steps trained so far, skipped ones among them."""
    skipped_steps: int = 0
    """Those that changed no weight."""
    max_steps: int | None = None
    rewards: Curve = field(default_factory=Curve)
    """Mean reward of each step so far."""
    reward_std: float | None = None
    """Of the newest step."""
    zero_spread_share: float | None = None
    completion_tokens: float | None = None
    """Mean sampled tokens per rollout, newest step."""
    turns: float | None = None
    learning_rate: float | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Of each step so far: divergence (`training/kl`), entropy, norm of the gradients."""
    sample: Rollout | None = None
    """One that the newest step was trained on."""

    advice: Sequence[Advice] = ()
    """What is wrong by the newest steps."""

    held_out: Mapping[str, float] = field(default_factory=dict)
    """Mean reward of the newest evaluation beside training, by environment."""
    evaluating_step: int | None = None
    """The step whose evaluation goes on."""
    evaluated_rollouts: int = 0
    """Of that evaluation, finished or lost so far."""

    policy_version: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    max_staleness: int | None = None

    generation_tokens_per_s: Curve = field(default_factory=Curve)
    """Of the rollouts that ended in each step so far."""
    training_tokens_per_s: Curve = field(default_factory=Curve)

    in_flight: int = 0
    in_flight_limit: int | None = None
    ready_groups: int = 0
    groups_per_batch: int | None = None
    queued_batches: int = 0
    running_rollouts: int = 0
    """Rollouts whose agents run."""

    replicas: int = 0
    """Generators that serve."""
    replicas_min: int = 1
    replicas_max: int = 1
    replica_losses: int = 0
    """Times that one was lost."""

    moves: int = 0
    """Counts what the counts above don't show: steps of engines, and what the trainer told of."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds per phase of the newest step."""
    lag: LagStatistics = field(default_factory=LagStatistics)
    failures: Mapping[str, int] = field(default_factory=dict)
    """Rollouts that failed since the run began, by reason."""
    rollouts_trained: int = 0
    rollouts_filtered: int = 0
    rss_bytes: float = 0.0
    """All processes of the run together."""

    @property
    def has_begun(self) -> bool:
        """Whether its step is known: that of a run that goes on is, once its trainer has found its checkpoint."""
        return self.stage is not Stage.STARTING or self.step > 0


def snapshot(
    so_far: RunView,
    *,
    observer: RunObserver,
    ledger: Ledger,
    statistics: SchedulerStatistics,
    evaluator: Evaluator,
    lag: LagStatistics,
) -> RunView:
    """Where the run is now: `so_far`, which knows settings, stage and step, with everything else."""
    latest, totals, tally = observer.latest, observer.totals, observer.tally(ledger)
    return replace(
        so_far,
        waiting_for=so_far.waiting_for or _waiting_for(so_far, statistics),
        skipped_steps=totals.skipped_steps,
        rewards=totals.rewards,
        reward_std=latest.get("reward/std"),
        zero_spread_share=latest.get("group/zero_spread_share"),
        completion_tokens=latest.get("rollout/completion_tokens"),
        turns=latest.get("rollout/turns"),
        learning_rate=latest.get("training/learning_rate"),
        curves=totals.curves,
        sample=observer.sample,
        advice=observer.advice,
        held_out={name: course.reward_last for name, course in totals.evaluations.items()},
        evaluating_step=evaluator.step,
        evaluated_rollouts=evaluator.ended,
        staleness_mean=latest.get("staleness/mean", 0.0),
        staleness_max=int(latest.get("staleness/max", 0)),
        generation_tokens_per_s=totals.generation_tokens_per_s,
        training_tokens_per_s=totals.training_tokens_per_s,
        in_flight=statistics.in_flight,
        in_flight_limit=statistics.budget_ceiling,
        ready_groups=statistics.waiting_groups,
        queued_batches=statistics.batches_ahead,
        running_rollouts=statistics.running,
        phases_s={cost.name: cost.values.get("wall_s", 0.0) for cost in phase_costs(latest)},
        lag=lag,
        failures=tally.by_reason.get(TerminalState.FAILED, {}),
        rollouts_trained=tally.by_state[TerminalState.TRAINED],
        rollouts_filtered=tally.by_state[TerminalState.FILTERED],
        rss_bytes=sum(value for name, value in latest.items() if name.endswith("_rss_bytes")),
    )


def _waiting_for(view: RunView, statistics: SchedulerStatistics) -> str:
    """The stages that have work: whichever of them is stuck holds the run up."""
    if view.stage is Stage.EVALUATING:
        return "the last evaluation"
    if view.stage is Stage.STOPPING:
        return "the trainer's last save"
    busy = []
    if statistics.batches_ahead:
        busy.append(f"the trainer to finish step {view.step + 1}{_WAITING.get(statistics.verdict, '')}")
    if statistics.running:
        busy.append(f"{statistics.running} rollouts to finish")
    if statistics.paused:
        busy.append(f"{', '.join(statistics.paused)} to work again")
    return " and ".join(busy) or "groups to be scored"


class Pace:
    """How long a step takes lately, from snapshots of the step count: an exponential average over about ten steps."""

    _WEIGHT = 0.15

    def __init__(self) -> None:
        self._step = 0
        self._since_s: float | None = None
        self._step_s: float | None = None

    def observe(self, step: int, elapsed_s: float) -> None:
        """Take in a snapshot. What came before the first step is start-up, and does not count."""
        if step == self._step:
            return
        if self._since_s is not None and step > self._step:
            newest_s = (elapsed_s - self._since_s) / (step - self._step)
            self._step_s = newest_s if self._step_s is None else self._step_s + self._WEIGHT * (newest_s - self._step_s)
        self._step, self._since_s = step, elapsed_s

    def remaining_s(self, max_steps: int | None, elapsed_s: float) -> float | None:
        """Seconds left, or None while nothing is known. Counts down between steps."""
        if max_steps is None or self._step_s is None or self._since_s is None:
            return None
        spent_s = min(elapsed_s - self._since_s, self._step_s)
        return max(0.0, (max_steps - self._step) * self._step_s - spent_s)
