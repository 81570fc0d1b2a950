"""The trainer of a run that is not ours: what it tells on the stream of samples becomes the run's events.

    TrainingBegan    ─► TrainerStarted                  WeightsWritten   ─► folder read ─► ModelStateDictPublished
                                                        WeightsOffered   ────────────────► ModelStateDictPublished
    StepDone         ─► the scheduler ─► StepTrained    CheckpointSaved  ─► CheckpointWritten
    TrainingOver     ─► TrainerEnded                    StopRequested, of anybody ─► whoever pulls next

Nobody here starts, restarts or ends it, and no number of samples ends anything: the run waits for `TrainingOver`, and
the watchdog says for whom. A report that cannot be ends the run, and nothing of it is believed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.config import RunSettings
from tailrace.errors import LifecycleError, Misreported, SettingsError, TailraceError, TransportError
from tailrace.records import (
    CheckpointSaved,
    CheckpointWritten,
    ConsumerLost,
    FeedReport,
    ModelStateDictPublished,
    ModelStateDictRef,
    RunStatus,
    StepDone,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
    TrainingBegan,
    TrainingOver,
    WeightsOffered,
    WeightsWritten,
)
from tailrace.reporting.metrics import METRICS
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.trainer_lives import RunTrainer
from tailrace.timeouts import timeout
from tailrace.tracing.phases import phase
from tailrace.transport.channels import wait_until
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.samples.stream import SampleSender
from tailrace.transport.weights.stores import FolderPublisher

_logger = logging.getLogger(__name__)

_WORSE = (RunStatus.FINISHED, RunStatus.CANCELLED, RunStatus.FAILED)
_MOST_UNSAVED_STEPS = 1000
"""Steps back to which the scheduler's states are kept for a trainer that has told of no checkpoint, in no start."""


class FeedListener(Protocol):
    """Takes in what a trainer tells of samples: `scheduling.FeedScheduler`."""

    async def tell(self, report: FeedReport) -> None:
        """Raises `Misreported`."""

    def saved(self, step: int) -> None:
        """A durable checkpoint contains this step."""

    @property
    def num_consumers(self) -> int:
        """Ranks of the trainer that are there."""


class OutsideTrainer(RunTrainer):
    """Make it on a running event loop; it reads reports once somebody `listen`s.

    One that is silent may come back: only one is gone that told what cannot be, or whose stream is lost.
    """

    restarts = 0

    def __init__(
        self, samples: SampleSender, store: FolderPublisher | None, log: MemoryEventLog, *, last_read_s: float
    ) -> None:
        """Folders of weights are read into `store`; None: its process offers them to the generators itself.

        After the trainer's end they are read for `last_read_s` at most.
        """
        super().__init__()
        self.samples = samples
        self._store, self._log, self._last_read_s = store, log, last_read_s
        self._listener: FeedListener | None = None
        self._step = self._saved_step = 0
        self._weights: WeightsWritten | WeightsOffered | None = None
        """The newest that are not published yet."""
        self._asked = RunStatus.FINISHED
        """How the run is to end, as its owner says."""
        self._newest_weights = -1
        self._changed = asyncio.Event()
        self._why_closed = ""
        self._working = [
            asyncio.create_task(self._guarded(work), name=name)
            for work, name in (
                (self._read_reports, "reports of the trainer"),
                (self._publish, "weights of the trainer"),
                (self._relay_end, "requests to stop, for the trainer"),
                (self._end_without_trainer, "the end of a run that has no trainer"),
            )
        ]

    def listen(self, listener: FeedListener) -> None:
        """From now on this takes in what is told of samples."""
        self._listener = listener
        self._changed.set()

    # --- what its owner learns from the event log --------------------------------------------------------------------

    @override
    def saved(self, step: int) -> None:
        self._saved_step = max(step, self._saved_step)

    @override
    def earliest_step(self, step: int) -> int:
        return min(step, self._saved_step or max(0, step - _MOST_UNSAVED_STEPS))

    @override
    def state_at(self, states: SchedulerStates, step: int) -> bytes:
        return states.read_newest(step)

    @override
    def let_end(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """It ends by itself."""
        self._asked = max(self._asked, status, key=_WORSE.index)
        self._changed.set()

    # --- its end -----------------------------------------------------------------------------------------------------

    @override
    async def end_feed(self) -> None:
        await self.samples.close(self._why_closed)

    @override
    async def close(self) -> None:
        await cancelled(*self._working)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except TailraceError as error:
            self._give_up(error)
        except Exception as error:
            _logger.exception("what the trainer told cannot be handled")
            self._give_up(LifecycleError(f"what the trainer told cannot be handled: {type(error).__name__}: {error}"))

    def _give_up(self, why: TailraceError) -> None:
        if not self._gone.done() and not self._log.has_ended:
            self._why_closed = f"the run failed: {why}"
            self._gone.set_result(why)

    async def _read_reports(self) -> None:
        """Waits for reports; ends with the stream, or with the terminal record."""
        await wait_until(self._changed, lambda: self._listener is not None)
        assert self._listener is not None
        async for report in self.samples.reports():
            await self._listener.tell(report)
            await self._take(report, self._listener)
            if isinstance(report, TrainingOver):
                return
            if isinstance(report, ConsumerLost):
                self._changed.set()
        if not self._log.has_ended:
            raise TransportError("the stream of samples ended without the trainer's terminal record")

    async def _take(self, report: FeedReport, listener: FeedListener) -> None:
        """Tell the run what the trainer told, once the scheduler believes it."""
        epoch = self._log.epoch
        match report:
            case TrainingBegan(step=step, version=version):
                self._step = step
                self._newest_weights = min(self._newest_weights, version)
                await self._log.append(TrainerStarted(epoch=epoch, step=step, version=version))
            case StepDone(step=step, version=version, metrics=metrics):
                self._step = step
                await self._log.append(StepTrained(epoch=epoch, step=step, version=version, metrics=_known(metrics)))
            case WeightsWritten() | WeightsOffered():
                self._require_fitting(report)
                self._newest_weights, self._weights = report.version, report
                self._changed.set()
            case CheckpointSaved(step=step, path=path):
                if step > self._step:
                    raise Misreported(
                        f"consumer {report.consumer!r} saved a checkpoint of step {step}, and told of step {self._step}"
                        " last"
                    )
                listener.saved(step)
                await self._log.append(CheckpointWritten(epoch=epoch, step=step, path=path))
            case TrainingOver(status=status, reason=reason):
                self.has_answered = True
                if status is RunStatus.FINISHED:
                    await self._last_read()
                await self._end(status, reason)
            case _:
                pass

    async def _last_read(self) -> None:
        """Waits for the last weights, which may yet be evaluated: until they are published, or cannot be in time."""
        try:
            async with timeout(self._last_read_s):
                await wait_until(self._changed, lambda: self._weights is None or self._is_cut_short)
        except TimeoutError:
            late = "the trainer's last weights, of version %d, could not be read within %g s (evaluation.finish_s)"
            _logger.warning(late, self._newest_weights, self._last_read_s)

    def _require_fitting(self, reported: WeightsWritten | WeightsOffered) -> None:
        if reported.version < self._newest_weights:
            raise Misreported(
                f"consumer {reported.consumer!r} wrote weights of version {reported.version} after those of version "
                f"{self._newest_weights}: versions never run backwards"
            )
        if isinstance(reported, WeightsWritten) != (self._store is not None):
            taken = "the trainer's process (transport.weights = 'nccl')" if self._store is None else "folders"
            raise Misreported(
                f"consumer {reported.consumer!r} told of weights elsewhere than where this run takes them from: {taken}"
            )

    async def _publish(self) -> None:
        """Waits for weights that were told of; the newest alone are read. Ends never."""
        while True:
            await wait_until(self._changed, lambda: self._weights is not None)
            assert self._weights is not None
            reported = self._weights
            ref = reported.ref if isinstance(reported, WeightsOffered) else await self._read(reported)
            if ref is not None and not self._log.has_ended:
                await self._log.append(ModelStateDictPublished(epoch=self._log.epoch, ref=ref))
            if self._weights is reported:  # the end of a run that finished waits for this: it may yet be evaluated
                self._weights = None
                self._changed.set()

    async def _read(self, written: WeightsWritten) -> ModelStateDictRef | None:
        """None where the trainer may have removed them: newer ones came, or it has ended."""
        assert self._store is not None
        version = written.version
        try:
            with phase("publish", track="weights", about={"version": version}) as publishing:
                ref = await asyncio.to_thread(self._store.publish_folder, Path(written.folder), version)
                publishing.add_bytes(ref.num_bytes)
        except TransportError as error:
            if self._newest_weights <= version and not self.has_answered:
                raise
            if self._newest_weights <= version:
                _logger.warning("the trainer's last weights, of version %d, cannot be read: %s", version, error)
            return None
        return ref

    async def _relay_end(self) -> None:
        """Waits for a request to stop, and passes it on."""
        async for event in self._log.follow():
            if isinstance(event, StopRequested):
                await self.samples.request_stop(event)
                self._changed.set()
            elif isinstance(event, TrainerEnded):
                self._why_closed = self._why_closed or f"the run is over: {event.status}, {event.reason}"

    @property
    def _is_cut_short(self) -> bool:
        """Whether the run is cancelled, or fails, though it may have been about to finish before."""
        stop = self._log.stop
        return self._asked is not RunStatus.FINISHED or (stop is not None and stop.status is not RunStatus.FINISHED)

    async def _end_without_trainer(self) -> None:
        """Waits until a run that is cut short has no trainer that could answer, and ends it."""

        def is_alone() -> bool:
            is_there = self._listener is not None and self._listener.num_consumers
            return self._is_cut_short and self._log.stop is not None and not (is_there or self.has_answered)

        await wait_until(self._changed, is_alone)
        await self._end(self._asked, "no rank of the trainer was there")

    async def _end(self, status: RunStatus, reason: str) -> None:
        """The terminal record. Where a stop was asked for, the trainer does not make a success of it."""
        if (stop := self._log.stop) is not None:
            status = max(status, stop.status, key=_WORSE.index)
            addition = "" if reason in ("", stop.reason) else f"; {reason}"
            reason = f"{stop.role}: {stop.reason}{addition}"
        if not self._log.has_ended:
            await self._log.append(TrainerEnded(epoch=self._log.epoch, status=status, step=self._step, reason=reason))


def require_own_process(settings: RunSettings) -> None:
    """Raise `SettingsError` where all is to be in one process, and the trainer is a program of somebody's."""
    if settings.trainer.feed == "stream" and settings.placement == "inline":
        raise SettingsError(
            "trainer.feed = 'stream' leaves training to a program of yours, which placement = 'inline' would have in "
            "this process: write placement = 'local'",
            key=("placement",),
        )


def _known(metrics: Mapping[str, float]) -> dict[str, float]:
    """Finite ones by the names that Tailrace's own trainer has for them, and others apart."""
    return {
        name if name.startswith("training/") and name in METRICS else f"outside/{name}": value
        for name, value in metrics.items()
        if math.isfinite(value)
    }
