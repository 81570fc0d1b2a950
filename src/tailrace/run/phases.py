"""What every process of a run measures of itself: phases, loop lag, and its part of the trace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.reporting.settings import ObservabilitySettings
from tailrace.run.folder import RunPaths
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.phases import OTHER, PhaseRecorder
from tailrace.tracing.traces import join_trace, open_trace, remove_parts
from tailrace.tracing.wall_clock import monotonic_to_unix_ns

ORCHESTRATOR = "orchestrator"

_logger = logging.getLogger(__name__)


@asynccontextmanager
async def observed_process(
    role: str, paths: RunPaths, settings: ObservabilitySettings
) -> AsyncIterator[tuple[PhaseRecorder, LoopLagMonitor]]:
    """Measure phases and the loop's lag of all that is started in here; a stall is logged with its stack and phase."""
    max_bytes = int(settings.trace_mb * 1e6)
    trace = open_trace(paths.trace_parts, role, max_bytes=max_bytes) if settings.trace_mb else None
    try:
        other = OTHER if role == ORCHESTRATOR else f"{OTHER} ({role})"
        with PhaseRecorder(trace, other=other).recording() as phases:
            async with LoopLagMonitor(settings.lag_interval_s, stall_s=settings.stall_s, phases=phases) as lag:
                yield phases, lag
    finally:
        if trace is not None:
            await asyncio.to_thread(trace.close)


@asynccontextmanager
async def traced_run(paths: RunPaths, settings: ObservabilitySettings) -> AsyncIterator[None]:
    """Join the parts that the run's processes wrote into `trace.json`, once all have ended.

    The trace is of this start alone: it takes the place of that of an earlier one.
    """
    monotonic_to_unix_ns.cache_clear()  # the machine may have slept since the last run of this process
    try:
        if settings.trace_mb:
            await asyncio.to_thread(remove_parts, paths.trace_parts)
        yield
    finally:
        if settings.trace_mb:
            try:
                await asyncio.to_thread(join_trace, paths.trace_parts, paths.trace)
            except OSError as error:
                _logger.warning("the trace could not be written: %s", error.strerror)
