"""What each stage of the pipeline costs, alone and all together, with the loop's lag sampled every millisecond."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import msgspec

from tailrace.replay.loop_load import LagSampler, SampledLag, loop_traffic
from tailrace.replay.memory import PeakMemory, copy_s
from tailrace.replay.stages import Pipeline
from tailrace.reporting.formats import compact, num_bytes, seconds
from tailrace.tracing.phases import OTHER, PhaseRecorder, phase

IDLE, ALL = "idle loop", "all together"
_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class StageCost:
    """One row of the table: of the median run, but for lag and memory, which are of the worst."""

    phase: str
    wall_s: float
    cpu_s: float
    memory_copies: float
    """Wall time in copies of the payload: token columns, and routed experts."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    peak_bytes: int
    """Resident memory above what it was before the stage."""
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    wall_s: float
    cpu_s: float
    lag: SampledLag
    peak_bytes: int


class Replay:
    """Runs stages and measures them. Call `measure` in a task that began under `recorder.recording()`."""

    def __init__(self, pipeline: Pipeline, recorder: PhaseRecorder, *, payload_bytes: int, traffic: int, repeat: int):
        self._pipeline, self._recorder = pipeline, recorder
        self._payload_bytes, self._traffic, self._repeat = payload_bytes, traffic, repeat
        self._memory_copy_s = copy_s(payload_bytes)

    async def measure(self, only: str | None = None) -> list[StageCost]:
        """An idle loop, each stage alone and all together; with `only`, that stage alone, once those before it ran."""
        stages = self._pipeline.stages
        costs = [self._cost(IDLE, [await self._run(lambda: asyncio.sleep(_IDLE_S))])]
        for name, stage in stages.items():
            runs = []
            for _ in range(self._repeat if only in (None, name) else 1):
                await self._pipeline.prepare(name)
                runs.append(await self._run(stage))
                await self._pipeline.settle(name)
            if only in (None, name):
                costs.append(self._cost(name, runs))
            if only == name:
                return costs
        costs.append(self._cost(ALL, [await self._run(self._all) for _ in range(self._repeat)]))
        return costs

    async def _all(self) -> None:
        for stage in self._pipeline.stages.values():
            await stage()

    async def _run(self, stage: Callable[[], Awaitable[None]]) -> _Run:
        gc.collect()
        async with AsyncExitStack() as stack:
            with phase(OTHER):
                await stack.enter_async_context(loop_traffic(self._traffic))
            memory = stack.enter_context(PeakMemory())
            lag = LagSampler()
            async with lag:
                self._recorder.flush()
                started_s = time.perf_counter()
                await stage()
                wall_s = time.perf_counter() - started_s
                used = self._recorder.flush()
        cpu_s = sum(usage.cpu_s for name, usage in used.items() if name != OTHER)
        return _Run(wall_s, cpu_s, lag.statistics(), memory.peak_bytes - memory.before_bytes)

    def _cost(self, name: str, runs: list[_Run]) -> StageCost:
        median = sorted(runs, key=lambda run: run.wall_s)[len(runs) // 2]
        copies = 0.0 if name == IDLE else median.wall_s / self._memory_copy_s
        return StageCost(
            phase=name,
            wall_s=median.wall_s,
            cpu_s=median.cpu_s,
            memory_copies=copies,
            lag_p50_s=median.lag.p50_s,
            lag_p99_s=max(run.lag.p99_s for run in runs),
            lag_max_s=max(run.lag.max_s for run in runs),
            peak_bytes=max(run.peak_bytes for run in runs),
            payload_bytes=self._payload_bytes,
        )


HEADINGS = ("Phase", "Wall", "CPU", "× one copy", "Lag p50", "Lag p99", "Lag max", "Peak memory")


def rows(costs: list[StageCost]) -> Iterator[tuple[str, ...]]:
    """The table, for people."""
    for cost in costs:
        yield (
            cost.phase,
            seconds(cost.wall_s),
            seconds(cost.cpu_s),
            _copies(cost.memory_copies),
            *(seconds(lag_s) for lag_s in (cost.lag_p50_s, cost.lag_p99_s, cost.lag_max_s)),
            num_bytes(cost.peak_bytes),
        )


def _copies(count: float) -> str:
    return "" if not count else f"{count:.1f}" if count < 100 else compact(count)


def as_json(costs: list[StageCost]) -> str:
    """One line, an array of rows, for programs."""
    return msgspec.json.encode([asdict(cost) for cost in costs]).decode()
