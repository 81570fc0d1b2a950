"""One run: the scheduler, the weights' way to the generators, and the event log that ends it.

    follow   reads the event log: steps to the scheduler, published weights to their distributor, which reports what
             serves; the terminal record ends it
    work     schedules, evaluates, watches the roles; when it fails, or every task was handed out and trained, the
             trainer is asked to stop

The trainer alone ends a run, by its terminal record. Where it is gone without one, this writes it in its place. After
the record of a run that finished, an evaluation that is due or goes on is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tailrace.errors import EngineFailed, ErrorBudgetSpent, LifecycleError, SettingsError, TransportError
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage
from tailrace.records import (
    CheckpointWritten,
    ModelStateDictPublished,
    RunStatus,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.run.generators import Wait
from tailrace.run.observer import RunObserver
from tailrace.run.placement import SHUTDOWN, Placement
from tailrace.scheduling import Evaluator, StreamScheduler
from tailrace.transport.channels import wait_until
from tailrace.transport.events.log import MemoryEventLog

_logger = logging.getLogger(__name__)

ROLE = "orchestrator"
RUN_ENDED = "run_ended"
DATA_EXHAUSTED = "every task was handed out max_epochs times"

_EXPLANATION_S = 1.0
"""How long a failed engine's process has to be seen leaving, which tells more than the call that failed."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What the orchestrator runs once the trainer told where it is."""

    scheduler: StreamScheduler
    observer: RunObserver
    evaluator: Evaluator | None


WeightsInstalled = Callable[[int], Awaitable[None]]
"""Waits until every generator serves weights of this version, or newer ones."""
StartScheduler = Callable[[TrainerStarted, WeightsInstalled], Scheduling]


class Orchestrator:
    """Runs until the trainer's terminal record. Once trainer and weights are there it starts workers and scheduler."""

    def __init__(
        self, placement: Placement, log: MemoryEventLog, start_workers: Wait, start_scheduler: StartScheduler
    ) -> None:
        self.scheduler: StreamScheduler | None = None
        self.observer: RunObserver | None = None
        self.evaluator: Evaluator | None = None
        self.checkpoint = ""
        """Path of the newest one."""
        self.step = 0
        self.version = 0
        self.error: BaseException | None = None
        """What ended the run, where it was no wish."""
        self._placement, self._log = placement, log
        placement.weights.listener = self
        self._start_workers, self._start_scheduler = start_workers, start_scheduler
        self._started: TrainerStarted | None = None
        self.installed_version = 0
        """Lowest that a generator serves."""
        self._stop_requested = False
        self._stop_seen = asyncio.Event()
        self._scheduling: asyncio.Task[None] | None = None
        self._exhausted = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._has_ended = False
        self._changed = asyncio.Event()

    async def run(self) -> TrainerEnded:
        """Waits for the terminal record. Nothing that it started outlives it, and the ledger balances."""
        follower, worker = asyncio.create_task(self._follow()), asyncio.create_task(self._work())
        asked = asyncio.create_task(self._stop_seen.wait())
        through = asyncio.create_task(self._exhausted.wait())
        try:
            await asyncio.wait({follower, worker, asked, through}, return_when=asyncio.FIRST_COMPLETED)
            if not follower.done():
                if worker.done() or through.done():
                    await self._ask_to_stop(worker.exception() if worker.done() else None)
                await self._wait_for_record(follower)
            await self._finish_evaluating(follower.result(), worker)
            return follower.result()
        finally:
            started = (worker, follower, asked, through)
            await run_stage(ShutdownStage.CANCEL_ROLLOUTS, SHUTDOWN, lambda: _cancelled(*started))
            if self.scheduler:
                self.scheduler.finish(RUN_ENDED)

    async def request_stop(self, status: RunStatus, reason: str) -> None:
        """Ask the trainer to end; the first wish counts. What is left to do once it has ended is left."""
        if status is RunStatus.CANCELLED:
            self._interrupted.set()
        if not self._stop_requested and not self._has_ended:
            self._stop_requested = True
            await self._log.append(StopRequested(epoch=self._log.epoch, role=ROLE, status=status, reason=reason))

    @property
    def stage(self) -> str:
        """One word for people."""
        if self.scheduler is None:
            return "starting"
        if self._has_ended:
            return "evaluating" if self.evaluator and self.evaluator.step is not None else "stopping"
        return "stopping" if self._stop_requested else "training"

    @property
    def starting(self) -> str:
        """What a start waits for, for people."""
        if self._started is None:
            return "the trainer to load the model"
        return "the generator to load the model"

    # --- the event log -------------------------------------------------------------------------------------------

    async def _follow(self) -> TrainerEnded:
        """Waits for events; ends with the terminal record."""
        async for event in self._log.follow():
            match event:
                case TrainerStarted():
                    self._started, self.step, self.version = event, event.step, event.version
                case ModelStateDictPublished():
                    self._placement.weights.publish(event.ref)
                case StepTrained() | StepSkipped():
                    self.step, self.version = event.step, event.version
                    if self.scheduler:
                        self.scheduler.handle(event)
                        self._tell_evaluator(event.step)
                case CheckpointWritten():
                    self.checkpoint = event.path
                case StopRequested():
                    self._stop_requested = True
                    self._stop_seen.set()
                    _logger.info("stopping: %s", event.reason)
                    if self._scheduling:
                        self._scheduling.cancel()
                case TrainerEnded():
                    self._has_ended = True
                    return event
            self._changed.set()
        raise LifecycleError("the event log ended without the trainer's terminal record")

    async def _ask_to_stop(self, error: BaseException | None) -> None:
        if error is None:
            await self.request_stop(RunStatus.FINISHED, DATA_EXHAUSTED)
            return
        self.error = await self._explained(root_cause(error))
        _logger.error("the run failed: %s", self.error)
        _logger.debug("in full:", exc_info=error)
        await self.request_stop(RunStatus.FAILED, str(self.error))

    async def _explained(self, error: BaseException) -> BaseException:
        """A call that failed with its process may be told of a moment before the process's own end is."""
        if isinstance(error, EngineFailed):
            try:
                async with asyncio.timeout(_EXPLANATION_S):
                    await self._placement.watch()
            except TimeoutError:
                pass
            except (LifecycleError, SettingsError) as explanation:
                return explanation
        return error

    async def _wait_for_record(self, follower: asyncio.Task[TrainerEnded]) -> None:
        """Wait for the trainer's answer; where it is gone or too late, write the record in its place."""
        left = asyncio.ensure_future(self._placement.trainer_left())
        await asyncio.wait({follower, left}, timeout=SHUTDOWN.last_save_s, return_when=asyncio.FIRST_COMPLETED)
        has_left = left.done() and not follower.done()
        left.cancel()
        if follower.done():
            return
        late = f"the trainer did not answer a request to stop within {SHUTDOWN.last_save_s:g} s"
        why = str(self.error or ("the trainer left without telling how training ended" if has_left else late))
        record = TrainerEnded(epoch=self._log.epoch, status=RunStatus.FAILED, step=self.step, reason=why)
        with contextlib.suppress(TransportError):  # it came at the last moment
            await self._log.append(record)
        await asyncio.wait({follower})

    # --- the work ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Goes on until cancelled; any failure ends all of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._placement.watch())
            self._scheduling = tasks.create_task(self._schedule())
            tasks.create_task(self._evaluate())

    async def _schedule(self) -> None:
        await wait_until(self._changed, lambda: self._started is not None)
        assert self._started is not None
        await self._installed(self.version)
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._placement.ready())
            starting.create_task(self._start_workers())
        started = self._start_scheduler(self._started, self._installed)
        self.scheduler, self.observer, self.evaluator = started.scheduler, started.observer, started.evaluator
        if self.step == 0:
            self._tell_evaluator(0)
        self._changed.set()
        await self.scheduler.run()
        self._exhausted.set()

    async def _installed(self, version: int) -> None:
        await wait_until(self._changed, lambda: self.installed_version >= version)

    async def _evaluate(self) -> None:
        await wait_until(self._changed, lambda: self.evaluator is not None)
        assert self.evaluator is not None
        await self.evaluator.run()

    def _tell_evaluator(self, step: int) -> None:
        if self.evaluator is not None:
            self.evaluator.step_ended(step, self.version)

    async def _finish_evaluating(self, ended: TrainerEnded, worker: asyncio.Task[None]) -> None:
        """After a run that finished: wait for what is left to evaluate, until its deadline or a signal."""
        evaluator = self.evaluator
        if evaluator is None or evaluator.is_idle:
            return
        if ended.status is RunStatus.FINISHED and self._scheduling and not worker.done():
            self._scheduling.cancel()
            finishing = asyncio.create_task(evaluator.finish())
            interrupted = asyncio.create_task(self._interrupted.wait())
            await asyncio.wait({finishing, interrupted, worker}, return_when=asyncio.FIRST_COMPLETED)
            await _cancelled(finishing, interrupted)
        if not evaluator.is_idle:
            _logger.warning("the end of the run cancels the evaluation of %s", evaluator.describe())

    # --- weights -------------------------------------------------------------------------------------------------

    def weights_installed(self, version: int, duration_s: float) -> None:
        """See `WeightListener`."""
        self.installed_version = max(self.installed_version, version)
        self._changed.set()
        if self.scheduler:
            self.scheduler.weights_installed(self.installed_version)
        if self.observer:
            self.observer.weights_installed(duration_s)

    def weights_not_installed(self, version: int) -> None:
        """See `WeightListener`."""
        if self.observer:
            self.observer.weights_not_installed()
        if self.scheduler:
            self.scheduler.weights_not_installed(version)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def root_cause(error: BaseException) -> BaseException:
    """The error to tell a person, out of a group: a process that left explains the calls that failed with it."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, LifecycleError | SettingsError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, ErrorBudgetSpent):  # that one sums its errors up
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
