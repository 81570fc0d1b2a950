"""What work does to an event loop: a 1 ms sampler of its lag, and traffic beside the work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from tailrace.cancelling import cancelled

_INTERVAL_S = 0.001
_WORKS_EVERY_S = 0.05
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

    def __init__(self) -> None:
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
            self._due_s = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_s.append(max(0.0, time.monotonic() - self._due_s))


@asynccontextmanager
async def loop_traffic(count: int) -> AsyncIterator[None]:
    """So many tasks that wake again and again and do a little, as in an orchestrator's loop."""
    tasks = [asyncio.create_task(_wake_and_work(_WORKS_EVERY_S * index / count)) for index in range(count)]
    try:
        yield
    finally:
        await cancelled(*tasks)


async def _wake_and_work(offset_s: float) -> None:
    await asyncio.sleep(offset_s)
    while True:
        sum(item * item for item in range(_WORK_ITEMS))
        await asyncio.sleep(_WORKS_EVERY_S)
