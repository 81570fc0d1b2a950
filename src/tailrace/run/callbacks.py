"""A program's own functions, called with the metrics of each step and of each evaluation, beside the run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from tailrace.records import RunStatus
from tailrace.reporting.metrics import StepMetrics
from tailrace.reporting.observer import MetricsListener

RequestStop: TypeAlias = Callable[[RunStatus, str], Awaitable[None]]
OnMetrics: TypeAlias = Callable[[StepMetrics], object]
"""Returns True to end the run in order. May be async; else it is called in a thread, and may take its time."""


class Callbacks(MetricsListener):
    """Calls them one at a time and in order; the run goes on meanwhile, and waits for them at its end.

    What one of them raises ends the run, with a last save, and is kept as `error`.
    """

    def __init__(self, on_step: OnMetrics | None = None, on_evaluation: OnMetrics | None = None) -> None:
        self.error: BaseException | None = None
        self._on_step, self._on_evaluation = on_step, on_evaluation
        self._waiting: asyncio.Queue[tuple[OnMetrics, StepMetrics] | None] = asyncio.Queue()

    @override
    def step_ended(self, metrics: StepMetrics) -> None:
        if self._on_step is not None:
            self._waiting.put_nowait((self._on_step, metrics))

    @override
    def evaluated(self, metrics: StepMetrics) -> None:
        if self._on_evaluation is not None:
            self._waiting.put_nowait((self._on_evaluation, metrics))

    @contextlib.asynccontextmanager
    async def delivered(self, request_stop: RequestStop) -> AsyncIterator[None]:
        """While entered, calls them; on leaving, waits until they have all there was."""
        delivering = asyncio.create_task(self._deliver(request_stop), name="callbacks")
        try:
            yield
            self._waiting.put_nowait(None)
            await delivering
        finally:
            delivering.cancel()
            await asyncio.wait([delivering])

    async def _deliver(self, request_stop: RequestStop) -> None:
        while (due := await self._waiting.get()) is not None:
            callback, metrics = due
            if self.error is not None:
                continue
            name = getattr(callback, "__name__", type(callback).__name__)
            try:
                ends = await _called(callback, metrics)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the program's own, which gets it back
                self.error = error
                await request_stop(RunStatus.FAILED, f"{name} raised {type(error).__name__}: {error}")
            else:
                if isinstance(ends, bool | np.bool_) and ends:  # a count that a function happens to return is no answer
                    await request_stop(RunStatus.FINISHED, f"{name} asked for the end")


async def _called(callback: OnMetrics, metrics: StepMetrics) -> object:
    result = callback(metrics) if inspect.iscoroutinefunction(callback) else await asyncio.to_thread(callback, metrics)
    return await result if inspect.isawaitable(result) else result
