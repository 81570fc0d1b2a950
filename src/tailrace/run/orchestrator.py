"""One run: the scheduler, the weights' way to the generators, and the event log that ends it.

    follow   reads the event log: steps go to the scheduler, published weights to the router; ends with the terminal
             record
    work     schedules, evaluates, watches the roles; when it fails, or every task is done, the trainer is asked to stop

The trainer alone ends a run, by its terminal record. Where it is gone without one, or still loads when the run is
cancelled or fails, this writes it in its place. After a run that finished, it waits for evaluations that are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import (
    CheckpointError,
    EngineFailed,
    ErrorBudgetSpent,
    LifecycleError,
    ModelError,
    NothingLeft,
    PeerGone,
    SettingsError,
    TailraceError,
    TransportError,
)
from tailrace.generation.router.weights import WeightListener
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage
from tailrace.records import (
    CheckpointWritten,
    Event,
    ModelStateDictPublished,
    ModelStateDictRef,
    ReplicaJoined,
    ReplicaLeft,
    RunStatus,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.reporting.observer import EarlierStarts, RunObserver
from tailrace.reporting.run_view import Stage
from tailrace.reporting.summary import summed_up_s
from tailrace.reporting.totals import read_totals
from tailrace.rollouts import Rollouter
from tailrace.run.folder import RunPaths, count_starts, saved_step, wind_back
from tailrace.run.generators import ReplicaListener
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.started_roles import StartedRoles
from tailrace.scheduling import Evaluator, Scheduler
from tailrace.timeouts import timeout
from tailrace.transport.channels import wait_until
from tailrace.transport.events.log import MemoryEventLog

_logger = logging.getLogger(__name__)

ROLE = "orchestrator"
RUN_ENDED = "run_ended"
DATA_EXHAUSTED = "every task was handed out max_epochs times"

_EXPLANATION_S = 1.0
"""How long to wait for a process to end, whose error says more than that of a call to it or a queue that it left."""


class Orchestrator(WeightListener, ReplicaListener):
    """Runs until the trainer's terminal record. Schedules once trainer, weights and workers are ready."""

    def __init__(
        self,
        roles: StartedRoles,
        log: MemoryEventLog,
        paths: RunPaths,
        *,
        rollouter: Rollouter,
        scheduler: Scheduler,
        states: SchedulerStates,
        observer: RunObserver,
        evaluator: Evaluator,
    ) -> None:
        self.checkpoint = paths.newest_checkpoint()
        """Path of the newest one, which may be of an earlier start."""
        self.step = 0
        self.version = 0
        self.installed_version = -1 if roles.generators.awaits_weights else 0
        """Lowest that a generator serves; -1 before the trainer's first weights are there, where that is waited for."""
        self.events = 0
        """Read from the log."""
        self.has_begun = False
        """Whether rollouts are scheduled, or were."""
        self.error: BaseException | None = None
        """What failed the run."""
        self.has_ended = False
        """Whether the terminal record is there."""
        self.is_done = False
        """Whether `run` has ended: nothing can be asked of it any more."""
        self._roles, self._log, self._paths = roles, log, paths
        self._rollouter, self._scheduler, self._states = rollouter, scheduler, states
        self._observer, self._evaluator = observer, evaluator
        roles.generators.router.weights.listener = self
        self._untold: deque[Event] = deque()
        """Of generators that joined or left."""
        self._trainer_started = False
        self._is_interrupted = self._is_exhausted = self._is_hurried = False
        self._stop: StopRequested | None = None
        """The first request, once there is one."""
        self._cut_short: StopRequested | None = None
        """The first one of a run that is cancelled, or fails."""
        self._exhausted = DATA_EXHAUSTED
        """Why there is nothing more to schedule, once there is not."""
        self._scheduling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._taking_up: asyncio.Future[EarlierStarts] | None = None
        self._state = b""
        """The scheduler's, where the trainer goes on."""
        self._refused: CheckpointError | None = None
        """Why the run cannot go on there."""
        roles.generators.tell(self)

    async def run(self) -> TrainerEnded:
        """Waits for the terminal record. Nothing that it started outlives it, and the ledger balances."""
        follower, worker = asyncio.create_task(self._follow()), asyncio.create_task(self._work())
        ending = asyncio.create_task(self._until(lambda: self._stop is not None or self._is_exhausted))
        try:
            await asyncio.wait({follower, worker, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not follower.done():
                if worker.done() or self._is_exhausted:
                    await self._stop_trainer(worker.exception() if worker.done() else None)
                await self._wait_for_record(follower)
            ended = self._ended(follower)
            await self._finish_evaluating(ended, worker)
            if not self.has_begun:
                with contextlib.suppress(TailraceError):  # it failed the run already
                    self._observer.begin(await self._take_up())
            return ended
        finally:
            cancel = lambda: self._cancel(worker, follower, ending)  # noqa: E731
            await run_stage(ShutdownStage.CANCEL_ROLLOUTS, self._roles.shutdown, cancel)
            self._scheduler.finish(RUN_ENDED)
            self.is_done = True

    async def request_stop(self, status: RunStatus, reason: str, *, hurried: bool = False) -> None:
        """Ask the trainer to end; the first request counts. A trainer that is gone is not started again for it.

        A later one, of a run that is cancelled or fails, counts where the run was to finish: it bounds how long that
        may still take.
        `hurried`: who asks will end everything soon, and waits for a last save for `shutdown.grace_s` alone.
        """
        self._is_hurried = self._is_hurried or hurried
        self._roles.trainer.let_end(status)
        if status is RunStatus.CANCELLED:
            self._is_interrupted = True
        stop = StopRequested(epoch=self._log.epoch, role=ROLE, status=status, reason=reason)
        is_first = self._stop is None and not self.has_ended
        self._asked(stop)
        if is_first:
            await self._log.append(stop)

    def _asked(self, stop: StopRequested) -> None:
        if not self.has_ended:
            self._stop = self._stop or stop
            if stop.status is not RunStatus.FINISHED:
                self._cut_short = self._cut_short or stop
        self._changed.set()

    async def fail(self, error: LifecycleError) -> None:
        """End the run as failed, for a reason that no part of it raises."""
        if self._cut_short is None and not self.has_ended:
            self.error = error
            _logger.error("the run failed: %s", error)
            await self.request_stop(RunStatus.FAILED, str(error), hurried=True)

    @property
    def stage(self) -> Stage:
        """Where the run is."""
        if not self.has_begun:
            return Stage.STARTING
        if self.has_ended:
            return Stage.EVALUATING if self._evaluator.step is not None else Stage.STOPPING
        return Stage.TRAINING if self._stop is None else Stage.STOPPING

    @property
    def start_waits_for(self) -> str:
        """For people; empty once it has begun."""
        if self.has_begun:
            return ""
        generators = self._roles.generators
        if self._trainer_started and generators.begins_with > 1:
            return f"{generators.begins_with} generators to serve; {generators.pool.serving} do"
        return f"the {'generator' if self._trainer_started else 'trainer'} to load the model"

    # --- the event log -------------------------------------------------------------------------------------------

    async def _follow(self) -> TrainerEnded:
        """Waits for events; ends with the terminal record."""
        async for event in self._log.follow():
            self.events += 1
            match event:
                case TrainerStarted():
                    self._start_trainer(event)
                case ModelStateDictPublished():
                    self._publish(event.ref)
                case StepTrained() | StepSkipped() if event.step > self.step:  # else trained again, and told before
                    self.step, self.version = event.step, event.version
                    self._roles.trainer.step_ended(event.step, event.version)
                    self._states.step_ended(self._roles.trainer.earliest_step(event.step))
                    self._scheduler.handle(event)
                    self._evaluator.step_ended(event.step, event.version)
                case CheckpointWritten():
                    self.checkpoint = self._paths.checkpoint_seen_here(event.path)
                    self._observer.checkpoint_written(event.step, self.checkpoint)
                    self._roles.trainer.saved(event.step)
                case StopRequested():
                    self._asked(event)
                    _logger.info("stopping: %s", event.reason)
                    self._stop_scheduling()
                case TrainerEnded():
                    self.has_ended = True
                    self._changed.set()
                    return event
            self._changed.set()
        raise LifecycleError("the event log ended without the trainer's terminal record")

    def _start_trainer(self, event: TrainerStarted) -> None:
        """A trainer that was started again goes on further back: what it trains again changes no figure."""
        if self._trainer_started:
            self._roles.generators.router.weights.trainer_restarted()
        else:
            self._trainer_started, self.step, self.version = True, event.step, event.version
            self.checkpoint = self._resumed_from(event.step)
        self._roles.trainer.started(event.step)

    def _resumed_from(self, step: int) -> str:
        """The checkpoint that the trainer found: not always the newest folder, and an outside trainer has its own."""
        found = self._paths.checkpoint(step)
        return str(found) if found.is_dir() else ""

    def _publish(self, ref: ModelStateDictRef) -> None:
        """Generators take these weights, unless they have newer ones of a trainer that ended early.

        What is published is of a step that is told of next; should the trainer end before, tokens may have its version.
        """
        if ref.version > self.version:
            self._roles.trainer.step_ended(self.step + 1, ref.version)
        weights = self._roles.generators.router.weights
        weights.publish(ref)
        if weights.newest is ref:
            self._roles.trainer.published()

    def _ended(self, follower: asyncio.Task[TrainerEnded]) -> TrainerEnded:
        """The terminal record; one of our own where an event could not be handled, or no record could be read.

        Where the last save of a run that fails does so as well, both are told: the same disk is full, perhaps.
        """
        if follower.exception() is None:
            ended, stop = follower.result(), self._stop
            if stop is None or stop.reason in ended.reason or {stop.status, ended.status} != {RunStatus.FAILED}:
                return ended
            return msgspec.structs.replace(ended, reason=f"{stop.role}: {stop.reason}; then {ended.reason}")
        self.error = follower.exception()
        _logger.error("the run failed: %s", self.error, exc_info=self.error)
        epoch, reason = self._log.epoch, f"{ROLE}: {self.error}"
        return TrainerEnded(epoch=epoch, status=RunStatus.FAILED, step=self.step, reason=reason)

    async def _stop_trainer(self, error: BaseException | None) -> None:
        if error is None:
            await self.request_stop(RunStatus.FINISHED, self._exhausted)
            return
        self.error = await self._explained(root_cause(error))
        _logger.error("the run failed: %s", self.error)
        _logger.debug("in full:", exc_info=error)
        await self.request_stop(RunStatus.FAILED, str(self.error))

    async def _explained(self, error: BaseException) -> BaseException:
        """The error of the process that failed a call, or left a queue, which may be noticed a moment later."""
        if isinstance(error, EngineFailed | PeerGone):
            try:
                async with timeout(_EXPLANATION_S):
                    await self._roles.watch()
            except TimeoutError:
                return error
            except TailraceError as explanation:
                return explanation
        return error

    async def _wait_for_record(self, follower: asyncio.Task[TrainerEnded]) -> None:
        """Wait for the trainer's answer; where it is gone, too late or has nothing to save, write the record for it."""
        is_cut_short = self._until(lambda: self._cut_short is not None)  # till then it has all the time that it takes
        await first_done(asyncio.wait({follower}), self._roles.trainer.gone(), is_cut_short)
        stop = self._cut_short
        if follower.done():
            return
        # A rank that failed asks for itself: rank 0, or the end of a process, tells of its error, with its class
        if stop is not None and stop.role == ROLE and self._roles.trainer.is_loading:
            status, why = stop.status, f"{ROLE}: {stop.reason}"
        elif missing := await self._unanswered(follower):
            status, why = RunStatus.FAILED, str(self.error or missing)
        else:
            return
        record = TrainerEnded(epoch=self._log.epoch, status=status, step=self.step, reason=why)
        with contextlib.suppress(TransportError):  # it came at the last moment
            await self._log.append(record)
        await asyncio.wait({follower})
        with contextlib.suppress(LifecycleError):  # the launcher tells of what cannot be killed
            await self._roles.trainer.kill()  # whatever it waits for has had its time

    async def _unanswered(self, follower: asyncio.Task[TrainerEnded]) -> str:
        """Wait for the trainer's terminal record, until it is gone or too late; which, and empty where it answered."""
        left = asyncio.ensure_future(self._roles.trainer.gone())
        deadline_s = self._roles.shutdown.grace_s if self._is_hurried else self._roles.shutdown.last_save_s
        await asyncio.wait({follower, left}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if self._roles.trainer.has_answered:
            await asyncio.wait({follower, left}, return_when=asyncio.FIRST_COMPLETED)
        has_left = left.done() and not follower.done()
        left.cancel()
        if follower.done():
            return ""
        if has_left:
            return _without_record(left.result())
        late = f"the trainer did not answer a request to stop within {deadline_s:g} s"
        _logger.error("stopping: %s", late)  # although the run may have failed for something else
        return late

    # --- the work ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Goes on until cancelled; any failure ends all of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._roles.watch())
            self._scheduling = tasks.create_task(self._schedule())
            tasks.create_task(self._evaluator.run(self._may_be_evaluated))
            tasks.create_task(self._tell_of_replicas())

    async def _tell_of_replicas(self) -> None:
        """Waits for generators that join or leave, and logs them, between the trainer's start and its end."""
        while not self._log.has_ended:
            await self._until(lambda: self._trainer_started and bool(self._untold))
            if not self._log.has_ended:
                await self._log.append(self._untold.popleft())

    async def _schedule(self) -> None:
        """Waits for the trainer, its weights in the generators, and the workers; then schedules until the tasks end.

        Workers, on this machine or a cluster's, start while the others load the model.
        """
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._rollouter.start())
            await self._until(lambda: self._trainer_started)
            await self._installed(self.version)
            await self._roles.generators.serving()
        earlier = await self._take_up()
        if self._refused is not None:
            raise self._refused
        self._scheduler.start(
            step=self.step,
            version=self.version,
            serving_version=self.installed_version,
            state=self._state,
            resumes=earlier.starts,
        )
        self._observer.begin(earlier)
        self.has_begun = True
        evaluated = max((course.step_last for course in earlier.totals.evaluations.values()), default=None)
        self._evaluator.begin(self.step, self.version, evaluated=evaluated)
        try:
            await self._scheduler.run()
        except* NothingLeft as learned:
            self._exhausted = str(_leaves(learned)[0])
        self._is_exhausted = True
        self._changed.set()

    async def _take_up(self) -> EarlierStarts:
        """Let the run's folder end where the trainer begins; what earlier starts came to. Done once, then known."""
        if self._taking_up is None:
            reading = self._read_earlier(self.step if self._trainer_started else None)
            self._taking_up = asyncio.ensure_future(reading)
        return await asyncio.shield(self._taking_up)

    async def _read_earlier(self, step: int | None) -> EarlierStarts:
        """An earlier start may have been told of the checkpoint that the trainer would go back to."""
        if step is not None:
            self._roles.trainer.saved(await asyncio.to_thread(saved_step, self._paths))
        return await asyncio.to_thread(self._wind_back, step)

    def _wind_back(self, step: int | None) -> EarlierStarts:
        """None: the trainer has not come up, and every step stays. So it does where the run cannot go on there."""
        if step is not None:
            trainer = self._roles.trainer
            self._states.step_ended(trainer.earliest_step(step))
            try:
                self._state = trainer.state_at(self._states, step)
            except CheckpointError as refused:
                self._refused = refused
            else:
                wind_back(self._paths, step)
        totals, starts = read_totals(self._paths.metrics), count_starts(self._paths) - (step is not None)
        return EarlierStarts(totals, starts, max(totals.clock_s, summed_up_s(self._paths.root)))

    async def _installed(self, version: int) -> None:
        await self._until(lambda: self.installed_version >= version)

    async def _may_be_evaluated(self, version: int) -> bool:
        """Waits until these weights, or newer ones, serve; False once the trainer has ended without publishing any."""

        def never_come() -> bool:
            newest = self._roles.generators.router.weights.newest
            return self.has_ended and (newest is None or newest.version < version)

        await self._until(lambda: self.installed_version >= version or never_come())
        if self.installed_version < version:
            _logger.warning("no evaluation of version %d: the trainer published no weights of it", version)
        return self.installed_version >= version

    async def _until(self, condition: Callable[[], bool]) -> None:
        await wait_until(self._changed, condition)

    async def _finish_evaluating(self, ended: TrainerEnded, worker: asyncio.Task[None]) -> None:
        """After a run that finished: wait for what is left to evaluate, until its deadline or a signal."""
        evaluator = self._evaluator
        if evaluator.is_idle:
            return
        if ended.status is RunStatus.FINISHED and self._scheduling and not worker.done():
            self._stop_scheduling()
            await first_done(evaluator.finish(), self._until(lambda: self._is_interrupted), asyncio.wait({worker}))
        if not evaluator.is_idle:
            _logger.warning("the end of the run cancels the evaluation of %s", evaluator.describe())

    def _stop_scheduling(self) -> None:
        """Cancel it, once: a second cancellation would cut short what rollouts do to end in order."""
        if self._scheduling is not None and not self._scheduling.cancelling():
            self._scheduling.cancel()

    async def _cancel(self, *tasks: asyncio.Task[Any]) -> None:
        """All of these, which cancel the scheduling as well, once that has ended."""
        self._stop_scheduling()
        try:
            if self._scheduling is not None:
                await asyncio.wait({self._scheduling})
        finally:
            await cancelled(*tasks)

    # --- generators ----------------------------------------------------------------------------------------------

    @override
    def replica_joined(self, name: str, serving: int) -> None:
        self._untold.append(ReplicaJoined(epoch=self._log.epoch, name=name, serving=serving))
        self._changed.set()

    @override
    def replica_left(self, name: str, serving: int, *, reason: str, in_order: bool) -> None:
        left = ReplicaLeft(epoch=self._log.epoch, name=name, serving=serving, reason=reason, in_order=in_order)
        self._untold.append(left)
        self._changed.set()

    # --- weights -------------------------------------------------------------------------------------------------

    @override
    def weights_installed(self, version: int, duration_s: float) -> None:
        self.installed_version = max(self.installed_version, version)
        self._changed.set()
        self._scheduler.weights_installed(self.installed_version)
        self._observer.weights_installed(duration_s)

    @override
    def weights_not_installed(self, version: int) -> None:
        self._observer.weights_not_installed()
        self._scheduler.weights_not_installed(version)


def _without_record(gone: TailraceError) -> str:
    """Why there is no trainer, where it is not that it left."""
    return "the trainer left without its terminal record" if isinstance(gone, LifecycleError) else str(gone)


def root_cause(error: BaseException) -> BaseException:
    """The error to show, out of a group: a process that left explains the calls that failed with it."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, LifecycleError | SettingsError | ModelError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, ErrorBudgetSpent):  # that one sums its errors up
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
