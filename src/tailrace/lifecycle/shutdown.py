"""Shutdown in order: each stage with a deadline, every stage tried, and the one that overran or failed named.

Whoever owns a part runs its stage on the way out; the order is that in which an exit stack unwinds.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tailrace.lifecycle.settings import ShutdownSettings

_logger = logging.getLogger(__name__)

_CANCEL_GRACE_S = 1.0
"""How long a stage past its deadline has to clean up after its cancellation before it is left behind."""

Action: TypeAlias = Callable[[], Awaitable[None]]


class ShutdownStage(enum.StrEnum):
    """What a shutdown does, in this order; the trainer's last save comes after the first."""

    CANCEL_ROLLOUTS = "cancel_rollouts"
    """Admission stops with it."""
    CLOSE_TRANSPORTS = "close_transports"
    STOP_GENERATORS = "stop_generators"
    CLOSE_EVENT_LOG = "close_event_log"
    """The trainer leaves with its end."""


class StageOutcome(enum.StrEnum):
    """How a stage went."""

    DONE = "done"
    OVERRAN = "overran"
    FAILED = "failed"


async def run_stage(stage: ShutdownStage, settings: ShutdownSettings, action: Action) -> StageOutcome:
    """Wait for one stage until its deadline. Whatever becomes of it, the shutdown goes on; the log names it.

    Cancelling this cancels the stage.
    """
    deadline_s = settings.deadline_s(stage)
    task = asyncio.ensure_future(action())
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        overran = not task.done()
        if overran:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if overran or task.cancelled():
        _logger.error("stopping: %s took longer than its %g s and was given up", stage, deadline_s)
        return StageOutcome.OVERRAN
    error = task.exception()
    if error is None:
        return StageOutcome.DONE
    if not isinstance(error, Exception):
        raise error
    _logger.error("stopping: %s failed: %s", stage, error, exc_info=error)
    return StageOutcome.FAILED
