"""The orchestrator as a run has it, over a generator and a trainer in other processes that do no work."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tailrace.batching import FormedBatch
from tailrace.config import RunSettings
from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.lifecycle.memory import reserve_memory, share_one_arena
from tailrace.records import RunStatus, StepSkipped, StepTrained
from tailrace.rollouts import ChatRenderer, LoadedEnvironment
from tailrace.run.composition import RunGround, compose
from tailrace.run.folder import RunPaths
from tailrace.run.phases import ORCHESTRATOR, observed_process

Metrics = dict[str, float]
StepEnded = Callable[[StepTrained | StepSkipped, FormedBatch], None]


class Marks:
    """CPU time and trained rollouts at the end of each step; what counts begins at the end of step `first`."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.trained = 0
        self.metrics: list[Metrics] = []
        """Of each step, where a run reports them."""
        self._marks: list[tuple[float, int]] = []
        self._awaited: list[tuple[int, asyncio.Event]] = []

    def add(self, rollouts: int) -> None:
        """So many were trained in a step that ended."""
        self.trained += rollouts
        self._marks.append((time.process_time(), self.trained))
        for trained, reached in self._awaited:
            if self.trained >= trained:
                reached.set()

    async def reached(self, trained: int) -> None:
        """Waits until so many rollouts are trained."""
        if self.trained < trained:
            event = asyncio.Event()
            self._awaited.append((trained, event))
            await event.wait()

    @property
    def counted(self) -> list[Metrics]:
        """Metrics of the steps that `cpu_s_per_rollout` is of."""
        return self.metrics[self.first :]

    @property
    def cpu_s_per_rollout(self) -> float:
        """From the end of step `first` to that of the last: steps that end together share what one of them took."""
        (since_s, before), (until_s, after) = self._marks[self.first - 1], self._marks[-1]
        return (until_s - since_s) / (after - before)


async def run_composed(
    settings: RunSettings,
    environments: dict[str, LoadedEnvironment],
    renderer: ChatRenderer,
    until: Callable[[Marks], Coroutine[Any, Any, None]],
    *beside: Coroutine[Any, Any, object],
    first: int = 1,
) -> Marks:
    """A run of `settings` until `until` returns, with `beside` on its loop meanwhile; `first` as of `Marks`."""
    share_one_arena()
    reserve_memory(settings.max_running)
    with tempfile.TemporaryDirectory() as folder, hold_old_objects():
        paths, marks = RunPaths(Path(folder)), Marks(first)
        async with AsyncExitStack() as stack:
            observing = observed_process(ORCHESTRATOR, paths, settings.observability)
            phases, lag = await stack.enter_async_context(observing)
            async with compose(RunGround(settings, paths, environments, renderer, phases, lag)) as run:
                observer = run.observer
                ended = counted(observer.step_ended, marks, lambda: dict(observer.latest))
                observer.step_ended = ended  # type: ignore[method-assign]
                async with running(*beside), asyncio.TaskGroup() as tasks:
                    ending = tasks.create_task(run.orchestrator.run())
                    measuring = tasks.create_task(until(marks))
                    await asyncio.wait({ending, measuring}, return_when=asyncio.FIRST_COMPLETED)
                    if ending.done():
                        raise RuntimeError(f"the run ended before it was measured: {ending.result()}")
                    await run.orchestrator.request_stop(RunStatus.FINISHED, "measured")
                await run.writers.close(10.0)
    return marks


def counted(step_ended: StepEnded, marks: Marks, latest: Callable[[], Metrics]) -> StepEnded:
    """The observer's, and the marks'."""

    def both(event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        step_ended(event, formed)
        marks.add(formed.batch.summary.num_rollouts)
        marks.metrics.append(latest())

    return both


@asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """All of them, until this context is left."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
