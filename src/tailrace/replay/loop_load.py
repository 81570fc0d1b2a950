"""To measure what work does to an event loop: a 1 ms sampler of its lag, and traffic beside the work.

>>> async def example() -> tuple[float, int]:
...     async with LoopTraffic(10), LagSampler() as lag:
...         await asyncio.sleep(0.05)
...     return lag.statistics().p99_s, lag.statistics().count
>>> p99_s, count = asyncio.run(example())
>>> p99_s >= 0, count > 0
(True, True)
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

_WORK_ITEMS = 100
"""Steps of Python work that a task of the traffic does when it wakes: some microseconds."""


@dataclass(frozen=True, slots=True)
class SampledLag:
    """How much later than asked the loop resumed a sleeping task, in seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float


class LagSampler:
    """Asks the loop to be woken every millisecond, and notes how late it was. Use it as an async context manager."""

    def __init__(self, interval_s: float = 0.001) -> None:
        self._interval_s = interval_s
        self._lags_s: list[float] = []
        self._due_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagSampler:
        self._lags_s.clear()
        self._task = asyncio.create_task(self._sample(), name="lag-sampler")
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._lags_s.append(max(0.0, time.monotonic() - self._due_s))  # what held the loop until now
        self._task.cancel()
        await asyncio.wait([self._task])

    def statistics(self) -> SampledLag:
        """Of the samples so far. Raises `ValueError` where there is none."""
        p50, p99 = np.percentile(self._lags_s, (50, 99)).tolist()
        return SampledLag(len(self._lags_s), p50, p99, max(self._lags_s))

    async def _sample(self) -> None:
        while True:
            self._due_s = time.monotonic() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._lags_s.append(max(0.0, time.monotonic() - self._due_s))


class LoopTraffic:
    """So many tasks that wake again and again and do a little: what an orchestrator's loop does beside the work."""

    def __init__(self, tasks: int = 200, *, every_s: float = 0.05) -> None:
        self._count, self._every_s = tasks, every_s
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> LoopTraffic:
        self._tasks = [
            asyncio.create_task(self._live(self._every_s * index / self._count)) for index in range(self._count)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _live(self, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        while True:
            sum(item * item for item in range(_WORK_ITEMS))
            await asyncio.sleep(self._every_s)
