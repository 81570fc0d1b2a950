"""Where everything is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.scheduling.admission import Verdict


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot. Counts are rollouts unless named otherwise."""

    running: int
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
    """Seconds in which no batch was on its way: the trainer waited for data."""
    held_s: float
    """Seconds in which a full batch was held for a group that would have become too old (`on_stale = wait`)."""
    restarted_groups: int
    """Groups stopped and started again."""
    set_aside: int
    """Groups that stopped at the edge of a step and go on in the next one."""
