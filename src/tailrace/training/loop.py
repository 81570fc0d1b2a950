"""The trainer's loop: waits for a batch or for a request to stop, whichever comes first.

    batch ─► train_step (own thread) ─► snapshot ─► publish ─► ModelStateDictPublished ─► StepTrained ─► acknowledge
                                └─ skipped: StepSkipped, and published where it makes a version all the same
    every so often, and at the end: copy the state ─► write it (another thread) ─► CheckpointWritten

A snapshot that a GPU made, or that ranks gathered, is published and reported while the next batch computes; no step is
reported before it. Steps and copies run in one thread of their own, and a step that runs is always finished.
`TrainerEnded` is appended exactly once, on every way out: max_steps, a stop answered, a failure, a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from tailrace.errors import PeerGone, RankLost, TailraceError, TransportError
from tailrace.records import (
    Batch,
    CheckpointWritten,
    ModelStateDictPublished,
    RunStatus,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.tracing.phases import PhaseRecorder, phase
from tailrace.training.checkpoints.files import StagedCheckpoint
from tailrace.training.checkpoints.snapshots import Snapshot
from tailrace.training.model.acceleration import tune_process
from tailrace.training.trainer import StepResult, Trainer
from tailrace.transport.batches.queue import BatchReceiver
from tailrace.transport.events.log import EventLog
from tailrace.transport.weights.stores import ModelStateDictStore

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

_EXPLANATION_S = 3.0
"""How long a lost rank's own process may take to be missed by whoever started it."""
_LEAST_PAUSE = 20
"""Between checkpoints, in durations of the last one: they take 5 % of the time at most."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings of the trainer's loop."""

    epoch: str
    """Of this start of the run; every event carries it."""
    checkpoints: Path
    """Folder that checkpoints go to."""
    resume_from: Path | None = None
    """Checkpoint to continue from."""
    publishes_first: bool = False
    """Whether the initial weights are published, too: generators may hold others."""
    checkpoint_every_s: float = 300.0
    """Between checkpoints, where no number of steps is set: what a crash may cost."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of published weights: what the generators compute in."""
    restarts_ranks: bool = False
    """Whether the loss of a rank, or of who sends batches, is left to whoever started the ranks, and starts them again:
    it ends no training."""
    is_elsewhere: bool = False
    """Whether its machine may be lost, or leave, while the run goes on: being cancelled ends no training."""
    working: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Around what each thread does: whoever watches them is told."""
    phases: PhaseRecorder | None = None
    """Of this process, reported with each step; None where another role of the process reports them."""


async def run_trainer(
    make_trainer: Callable[[], Trainer],
    batches: BatchReceiver,
    store: ModelStateDictStore,
    events: EventLog,
    plan: TrainerPlan,
) -> TrainerEnded:
    """Train until max_steps or a `StopRequested`; returns the terminal event, already appended.

    `make_trainer` is called in the thread that all compute runs in. Raises what ended training early, after appending
    the terminal event: `ModelError`, `CheckpointError`, `TrainingError`, `TransportError`, or the cancellation.
    """
    loop = _TrainerLoop(batches, store, events, plan)
    try:
        return await loop.run(make_trainer)
    except asyncio.CancelledError:
        if not plan.is_elsewhere:
            await loop.end_early(RunStatus.CANCELLED, "the trainer was cancelled")
        raise
    except RankLost as error:
        if plan.restarts_ranks:
            raise
        await loop.end_early(RunStatus.FAILED, await loop.explained(error), type(error).__name__)
        raise
    except Exception as error:
        if plan.restarts_ranks and isinstance(error, PeerGone):  # batches are sent again to who comes next
            raise
        await loop.end_early(RunStatus.FAILED, *reason_and_class(error))
        await loop.release_ranks()
        raise
    finally:
        await loop.close()


def reason_and_class(error: Exception) -> tuple[str, str]:
    """Reason and class of an error, as a terminal record has them; no class for what Tailrace did not expect."""
    if isinstance(error, TailraceError):
        return str(error), type(error).__name__
    return f"{type(error).__name__}: {error}", ""


class _TrainerLoop:
    def __init__(self, batches: BatchReceiver, store: ModelStateDictStore, events: EventLog, plan: TrainerPlan) -> None:
        self._batches, self._store, self._events, self._plan = batches, store, events, plan
        tune_process()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="trainer-publish")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")
        self._trainer: Trainer | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._stop = asyncio.create_task(self._stop_request(), name="trainer: stop request")
        self._step = 0
        self._saved_step: int | None = None
        self._saved_at_s, self._save_s = time.monotonic(), 0.0
        """When the last checkpoint was written, or training began; and how long that took."""
        self._checkpoint_metrics: dict[str, float] = {}
        self._ended = False

    async def run(self, make_trainer: Callable[[], Trainer]) -> TrainerEnded:
        """From start to the terminal event."""
        trainer = self._trainer = await self._in_thread(make_trainer)
        await self._start(trainer)
        status, reason = RunStatus.FINISHED, f"max_steps = {trainer.max_steps} reached"
        while trainer.step < trainer.max_steps:
            batch = await self._next_batch()
            if isinstance(batch, StopRequested):
                status, reason = batch.status, f"{batch.role}: {batch.reason}"
                break
            await self._train(trainer, batch)
        await self._save(trainer)
        await self._saved()
        ended = await self._end(status, reason)
        await self.release_ranks()
        return ended

    async def end_early(self, status: RunStatus, reason: str, error: str = "") -> None:
        """Append the terminal event of a loop that failed. A log that is gone is logged, not raised.

        Nor is it an error where a cancelled trainer's is refused: who cancels it may have written its end before.
        """
        if self._ended:
            return
        if behind := self._behind:
            if status is RunStatus.CANCELLED:
                for task in behind:
                    task.cancel()
            await asyncio.wait(behind)
        try:
            await self._end(status, reason, error)
        except (TransportError, OSError) as failure:
            is_told = status is RunStatus.CANCELLED and isinstance(failure, TransportError)
            level = logging.DEBUG if is_told else logging.ERROR
            _log.log(level, "the end of training (%s, %s) could not be logged: %s", status, reason, failure)

    async def explained(self, lost: RankLost) -> str:
        """Why a rank is gone: whoever started it knows more, and asks for a stop with what it knows.

        A checkpoint that the lost rank has a part in is given up, since its thread may wait for long.
        """
        self._saving = None
        await asyncio.wait({self._stop}, timeout=_EXPLANATION_S)
        if self._stop.done() and not self._stop.cancelled() and self._stop.exception() is None:
            stop = self._stop.result()
            if stop.status is RunStatus.FAILED:
                return f"{stop.role}: {stop.reason}"
        return str(lost)

    async def release_ranks(self) -> None:
        """Let the other ranks leave, once the terminal event is appended."""
        if self._trainer is not None:
            with contextlib.suppress(RankLost):
                await self._in_thread(self._trainer.close)

    async def close(self) -> None:
        """Stop tasks and threads."""
        self._stop.cancel()
        with contextlib.suppress(asyncio.CancelledError, TransportError):
            await self._stop
        self._executor.shutdown(wait=False)
        self._publisher.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    async def _start(self, trainer: Trainer) -> None:
        if (checkpoint := self._plan.resume_from) is not None:
            await self._in_thread(lambda: trainer.restore(checkpoint))
            self._saved_step = trainer.step
        self._step = trainer.step
        self._phase_metrics()  # leaves the start out of the first step
        await self._events.append(TrainerStarted(epoch=self._plan.epoch, step=trainer.step, version=trainer.version))
        if trainer.version > 0 or self._plan.publishes_first:  # else generators hold the initial model, version 0
            await self._publish(await self._in_thread(lambda: self._snapshot(trainer)))

    async def _train(self, trainer: Trainer, batch: Batch) -> None:
        """One batch, from compute to acknowledgement."""
        about, version = {"step": batch.summary.step}, trainer.version
        with phase("train", track="optimizer steps", num_bytes=batch.num_bytes, about=about):
            result = await self._in_thread(lambda: trainer.train_step(batch))
        await self._reported()
        self._step = result.step
        if result.skipped is not None:
            if result.version != version:  # it did before, in an earlier life
                await self._publish(await self._in_thread(lambda: self._snapshot(trainer)))
            await self._events.append(
                StepSkipped(epoch=self._plan.epoch, step=result.step, version=result.version, reason=result.skipped)
            )
            await self._batches.acknowledge(result.step)
        else:
            began_s = time.perf_counter()
            snapshot = await self._in_thread(lambda: self._snapshot(trainer))
            report = self._report(result, snapshot, time.perf_counter() - began_s)
            if snapshot.is_detached:
                self._reporting = asyncio.create_task(report, name="trainer: report of a step")
            else:
                await report
        if self._is_due(result.step, trainer.settings.checkpoint_every_steps):
            await self._save(trainer)

    def _is_due(self, step: int, every_steps: int | None) -> bool:
        """Whether a checkpoint of this step is to be written before the end."""
        if self._saving is not None and not self._saving.done() and every_steps is None:
            return False
        if every_steps is not None:
            return every_steps > 0 and step % every_steps == 0
        pause_s = max(self._plan.checkpoint_every_s, _LEAST_PAUSE * self._save_s)
        return time.monotonic() - self._saved_at_s >= pause_s

    async def _report(self, result: StepResult, snapshot: Snapshot, snapshot_s: float) -> None:
        """From a step's end, and the snapshot that took so long, to the acknowledgement of its batch."""
        metrics = result.metrics | {"training/publish_s": snapshot_s + await self._publish(snapshot)}
        metrics |= self._checkpoint_metrics | self._phase_metrics()
        self._checkpoint_metrics = {}
        await self._events.append(
            StepTrained(epoch=self._plan.epoch, step=result.step, version=result.version, metrics=metrics)
        )
        await self._batches.acknowledge(result.step)

    async def _reported(self) -> None:
        """Wait for the report of the previous step, if one is running. Raises what failed in it."""
        reporting, self._reporting = self._reporting, None
        if reporting is not None:
            await reporting

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written, if one is. Raises what failed in it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    @property
    def _behind(self) -> set[asyncio.Task[None]]:
        """What goes on beside training."""
        return {task for task in (self._reporting, self._saving) if task is not None}

    def _snapshot(self, trainer: Trainer) -> Snapshot:
        return trainer.snapshot(self._plan.publish_dtype, stays=self._store.keeps_tensors)

    async def _publish(self, snapshot: Snapshot) -> float:
        """Put the weights into the store and announce them; returns seconds."""
        started_s = time.perf_counter()
        executor = self._publisher if snapshot.is_detached else self._executor
        with phase("publish", track="weights", about={"version": snapshot.version}) as publishing:
            ref = await self._in_thread(lambda: self._store.publish(snapshot.wait(), snapshot.version), executor)
            publishing.add_bytes(ref.num_bytes)
        await self._events.append(ModelStateDictPublished(epoch=self._plan.epoch, ref=ref))
        return time.perf_counter() - started_s

    async def _save(self, trainer: Trainer) -> None:
        """Copy the state for a checkpoint, unless the last one holds this step already; it is written beside training.

        Waits for the one before.
        """
        await self._reported()
        if self._saved_step == trainer.step:
            return
        started_s = time.perf_counter()
        await self._saved()
        with phase("copy_state", track="optimizer steps", about={"step": trainer.step}):
            staged = await self._in_thread(lambda: trainer.stage_checkpoint(self._plan.checkpoints))
        self._checkpoint_metrics["training/checkpoint_stall_s"] = time.perf_counter() - started_s
        self._saved_step = trainer.step
        self._saving = asyncio.create_task(self._write(trainer, staged), name="trainer: checkpoint")

    async def _write(self, trainer: Trainer, staged: StagedCheckpoint) -> None:
        """From copies to a durable checkpoint, and its event."""
        started_s, step = time.perf_counter(), staged.state.step
        with phase("checkpoint", track="checkpoints", about={"step": step}):
            path = await self._in_thread(lambda: trainer.write_checkpoint(staged), self._writer)
        self._saved_at_s, self._save_s = time.monotonic(), time.perf_counter() - started_s
        self._checkpoint_metrics["training/checkpoint_s"] = self._save_s
        await self._events.append(CheckpointWritten(epoch=self._plan.epoch, step=step, path=str(path)))

    async def _next_batch(self) -> Batch | StopRequested:
        """The next batch, or the request to stop if there is one."""
        if self._stop.done():
            return self._stop.result()
        receiving = asyncio.create_task(self._batches.receive(), name="trainer: next batch")
        try:
            with phase("wait_for_batch", track="optimizer steps"):
                while not (receiving.done() or self._stop.done()):
                    await asyncio.wait({receiving, self._stop, *self._behind}, return_when=asyncio.FIRST_COMPLETED)
                    if self._reporting is not None and self._reporting.done():
                        await self._reported()
                    if self._saving is not None and self._saving.done():
                        await self._saved()
            return self._stop.result() if self._stop.done() else receiving.result()
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})

    async def _stop_request(self) -> StopRequested:
        """The first request to stop in the log. Raises `PeerGone` when the log ends without one."""
        async for event in self._events.follow():
            if isinstance(event, StopRequested) and event.epoch == self._plan.epoch:
                return event
        raise PeerGone("the event log ended before training did")

    async def _in_thread(self, work: Callable[[], ResultT], executor: Executor | None = None) -> ResultT:
        """Run `work` in the trainer's thread, or that of `executor`; a cancellation waits for it to finish."""
        context = contextvars.copy_context()  # phases inside are those of the phase around
        watched = partial(context.run, self._watched, work)
        future = asyncio.get_running_loop().run_in_executor(executor or self._executor, watched)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def _watched(self, work: Callable[[], ResultT]) -> ResultT:
        with self._plan.working(f"what follows step {self._step}"):
            return work()

    def _phase_metrics(self) -> dict[str, float]:
        used = self._plan.phases.flush() if self._plan.phases is not None else {}
        return {name: value for role, usage in used.items() for name, value in usage.metrics(role).items()}

    async def _end(self, status: RunStatus, reason: str, error: str = "") -> TrainerEnded:
        ended = TrainerEnded(epoch=self._plan.epoch, status=status, step=self._step, reason=reason, error=error)
        self._ended = True
        await self._events.append(ended)
        return ended
