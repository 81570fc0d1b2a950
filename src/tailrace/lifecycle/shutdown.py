"""Shutdown in order: each stage with a deadline, every stage tried, and the one that overran named.

`plan_shutdown` decides, `run_stages` acts.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.lifecycle.settings import ShutdownSettings

_logger = logging.getLogger(__name__)

_CANCEL_GRACE_S = 1.0
"""How long a stage past its deadline has to clean up after its cancellation before it is left behind."""

Action: TypeAlias = Callable[[], Awaitable[None]]


class ShutdownStage(enum.StrEnum):
    """What a shutdown does, in this order."""

    STOP_ADMISSION = "stop_admission"
    CANCEL_ROLLOUTS = "cancel_rollouts"
    LAST_SAVE = "last_save"
    CLOSE_TRANSPORTS = "close_transports"
    STOP_GENERATORS = "stop_generators"
    CLOSE_EVENT_LOG = "close_event_log"


class StageOutcome(enum.StrEnum):
    """How a stage went."""

    DONE = "done"
    OVERRAN = "overran"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage, what it does, and how long it may."""

    stage: ShutdownStage
    deadline_s: float
    action: Action


@dataclass(frozen=True, slots=True)
class StageReport:
    """What became of one stage."""

    stage: ShutdownStage
    outcome: StageOutcome
    wall_s: float
    error: Exception | None = None

    def __str__(self) -> str:
        reason = f": {self.error}" if self.error else ""
        return f"shutdown stage {self.stage} {self.outcome} after {self.wall_s:.1f} s{reason}"


def plan_shutdown(settings: ShutdownSettings, actions: Mapping[ShutdownStage, Action]) -> list[PlannedStage]:
    """The stages that have an action, in order, each with its deadline."""
    deadlines = settings.model_dump()
    return [PlannedStage(stage, deadlines[f"{stage}_s"], actions[stage]) for stage in ShutdownStage if stage in actions]


async def run_stages(stages: Sequence[PlannedStage]) -> list[StageReport]:
    """Run every stage, whatever became of those before it. Waits for each until its deadline, then goes on.

    A stage's error is in its report and in the log. Cancelling this cancels the stage it is in.
    """
    reports = []
    for planned in stages:
        report = await _run_stage(planned)
        if report.outcome is not StageOutcome.DONE:
            _logger.error("%s", report, exc_info=report.error)
        reports.append(report)
    return reports


async def _run_stage(planned: PlannedStage) -> StageReport:
    clock = asyncio.get_running_loop().time
    start_s = clock()
    task = asyncio.ensure_future(planned.action())
    try:
        await asyncio.wait({task}, timeout=planned.deadline_s)
        overran = not task.done()
        if overran:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
    except asyncio.CancelledError:
        task.cancel()
        raise
    wall_s = clock() - start_s
    if overran or task.cancelled():
        return StageReport(planned.stage, StageOutcome.OVERRAN, wall_s)
    error = task.exception()
    if error is None:
        return StageReport(planned.stage, StageOutcome.DONE, wall_s)
    if not isinstance(error, Exception):
        raise error
    return StageReport(planned.stage, StageOutcome.FAILED, wall_s, error)
