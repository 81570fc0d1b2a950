"""Shutdown in order: each stage with a deadline, every stage tried, and one that overran or failed named in the log.

The owner of a part runs its stage on the way out, in the order in which an exit stack unwinds.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable

from tailrace.config.shutdown import ShutdownSettings

_logger = logging.getLogger(__name__)

_CANCEL_GRACE_S = 1.0
"""How long a stage past its deadline has to clean up after its cancellation before it is left behind."""


class ShutdownStage(enum.StrEnum):
    """What a shutdown does, in this order; the trainer's last save comes after the first."""

    CANCEL_ROLLOUTS = "cancel_rollouts"
    """Admission stops with it. It has its deadline once more for what rollouts were played with."""
    CLOSE_TRANSPORTS = "close_transports"
    STOP_GENERATORS = "stop_generators"
    CLOSE_EVENT_LOG = "close_event_log"
    """The trainer leaves with its end."""


async def run_stage(stage: ShutdownStage, settings: ShutdownSettings, action: Callable[[], Awaitable[object]]) -> None:
    """Wait for one stage until its deadline; the log names one that overran or failed. Cancelling cancels it."""
    deadline_s: float = getattr(settings, f"{stage}_s")
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
    elif isinstance(error := task.exception(), Exception):
        _logger.error("stopping: %s failed: %s", stage, error, exc_info=error)
    else:
        task.result()  # raises what is no `Exception`
