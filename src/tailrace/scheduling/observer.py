"""What the scheduler reports: events, and a snapshot of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.batching import FormedBatch
from tailrace.records import Group, Outcome, Rollout, RolloutId, StepSkipped, StepTrained
from tailrace.scheduling.admission import Verdict


class SchedulerObserver(Protocol):
    """Called on the event loop, in order; must return at once and never raise."""

    def rollout_finished(self, rollout: Rollout) -> None:
        """An agent returned."""

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        """A rollout is terminal. `rollout` is None where it was lost; `message` then says why, for people."""

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        """A group has rewards and advantages; with a reason it will not be trained on.

        Where parts of it were released before, it comes last, complete and without advantages; a reason then is that of
        the rest.
        """

    def part_released(self, part: Group) -> None:
        """Some rollouts of a group have advantages and go on to be trained, before the group is complete."""

    def batch_sent(self, formed: FormedBatch) -> None:
        """A batch is on its way to the trainer."""

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """The trainer is done with a batch."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot. Counts are rollouts unless named otherwise."""

    running: int
    """Rollouts whose agents run."""
    waiting_groups: int
    batches_ahead: int
    in_flight: int
    admitted: int
    budget_free: int
    budget_ceiling: int
    verdict: Verdict
    waited_s: Mapping[Verdict, float]
    """Seconds that admission was held, by what held it."""
    trainer_waited_s: float
    """Seconds without a batch on its way: the trainer waited for data."""
    held_s: float
    """Seconds in which a full batch was held for a group that would have become too old (`on_stale = wait`)."""
    restarted_groups: int
    """Groups stopped and started again."""
    paused: Sequence[str]
    """Environments that pause, since they failed."""
    set_aside: int = 0
    """Rollouts that were set aside at the edge of a step and go on in the next one."""
    lent_slots: int = 0
    """Kept for rollouts of an evaluation beside training."""


class Stopwatch:
    """Adds up the time for which a condition holds.

    >>> now = 1.0
    >>> watch = Stopwatch(lambda: now)
    >>> watch.set(True); now = 3.0; watch.set(False); now = 9.0
    >>> watch.total_s
    2.0
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._total_s = 0.0

    def set(self, holds: bool) -> None:
        """From now on it holds, or not."""
        if holds != (self._since_s is not None):
            self._total_s, self._since_s = self.total_s, self._clock() if holds else None

    @property
    def total_s(self) -> float:
        """Until now, in seconds."""
        return self._total_s + (0.0 if self._since_s is None else self._clock() - self._since_s)
