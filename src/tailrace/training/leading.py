"""Rank 0 leads: what it is told to do, all other ranks are told to do at the same time.

    rank 0      run_trainer ──► LeadingTrainer ── TrainStep(7) ──► train_step(its rows) ─┐
    rank 1, 2   follow ◄───────────────────────────── order ──► train_step(their rows) ──┴─ collectives meet

An order says what comes next, never with which data: each rank has its own rows of every batch, from its own end of the
queue. An order is sent when rank 0 has what it needs, so only the wait for an order may last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import CorruptData, Diverged, RankLost, TailraceError, TransportError
from tailrace.records import Batch
from tailrace.timeouts import timeout
from tailrace.training.checkpoints.files import StagedCheckpoint
from tailrace.training.checkpoints.snapshots import Snapshot
from tailrace.training.model.acceleration import tune_process
from tailrace.training.ranks import JoinedRanks
from tailrace.training.trainer import StepResult, Trainer
from tailrace.transport.batches.queue import BatchReceiver

_log = logging.getLogger(__name__)

_LAST_WORD_S = 5.0
"""How long a rank that failed waits for word that rank 0 has failed, too, and ends training by itself."""


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train on your rows of this step's batch."""

    step: int


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Let rank 0 gather the weights."""

    dtype: Literal["float32", "bfloat16"]


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy your share for a checkpoint, and write it meanwhile."""

    folder: str


class RestoreCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Go on from this checkpoint."""

    path: str


class EndTraining(msgspec.Struct, frozen=True, tag=True):
    """Training is over: nothing follows."""


Order: TypeAlias = TrainStep | TakeSnapshot | SaveCheckpoint | RestoreCheckpoint | EndTraining

_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class LeadingTrainer(Trainer):
    """Rank 0's trainer, by which all ranks are driven. Its ranks are joined. Every other rank runs `follow`."""

    @override
    def train_step(self, batch: Batch) -> StepResult:
        with self._leading(TrainStep(batch.summary.step)):
            return super().train_step(batch)

    @override
    def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32", *, stays: bool = False) -> Snapshot:
        with self._leading(TakeSnapshot(dtype)):
            return super().snapshot(dtype, stays=stays)

    @override
    def stage_checkpoint(self, folder: Path) -> StagedCheckpoint:
        with self._leading(SaveCheckpoint(str(folder))):
            return super().stage_checkpoint(folder)

    @override
    def restore(self, checkpoint: Path) -> None:
        with self._leading(RestoreCheckpoint(str(checkpoint))):
            super().restore(checkpoint)

    @override
    def close(self) -> None:
        with self._leading(EndTraining()):
            pass

    @contextmanager
    def _leading(self, order: Order) -> Iterator[None]:
        """Around what every rank does at this order. Of an error of rank 0 they find word: it ends training for it."""
        assert isinstance(self._ranks, JoinedRanks)
        self._ranks.send_order(msgspec.msgpack.encode(order))
        try:
            yield
        except Exception as error:
            self._ranks.tell(error, lost=isinstance(error, RankLost))
            raise


async def follow(
    make_trainer: Callable[[], Trainer],
    batches: BatchReceiver,
    ranks: JoinedRanks,
    request_stop: Callable[[str], Awaitable[None]],
) -> None:
    """Do what rank 0 does until it ends training.

    `make_trainer` is called in the thread that all compute runs in. Raises what failed here, and `RankLost` where
    another rank is gone. Where rank 0 failed, too, that has the time to end training by itself before. Else it waits
    for this rank in an exchange, and `request_stop` is called with the reason: an error of Tailrace's own would come
    again, and nobody need start the ranks again for it. Rows that were lost on their way need not: they are sent again
    then. Those that are damaged lie where they are read again.
    """
    tune_process()
    threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("trainer", "trainer-checkpoint")]
    follower = _Follower(batches, ranks, *threads)
    try:
        await follower.run(make_trainer)
    except Exception as error:
        is_loss = isinstance(error, RankLost)
        ranks.tell(error, lost=is_loss)
        if isinstance(error, TailraceError) and not is_loss:
            has_ended = await follower.has_seen_the_end(error)
            may_pass = isinstance(error, TransportError) and not isinstance(error, CorruptData)
            if not (has_ended or may_pass):
                await request_stop(str(error))
        raise
    finally:
        for thread in threads:
            thread.shutdown(wait=False)


class _Follower:
    def __init__(
        self, batches: BatchReceiver, ranks: JoinedRanks, compute: ThreadPoolExecutor, writer: ThreadPoolExecutor
    ) -> None:
        self._batches, self._ranks, self._compute, self._writer = batches, ranks, compute, writer
        self._writing: Future[Path] | None = None

    async def run(self, make_trainer: Callable[[], Trainer]) -> None:
        """From start to rank 0's last order."""
        trainer = await self._in_thread(make_trainer)
        while not isinstance(order := await self._next_order(), EndTraining):
            await self._obey(order, trainer)
        await self._written()

    async def has_seen_the_end(self, error: TailraceError) -> bool:
        """Wait until rank 0 has ended training, or is gone; whether it has. False where it goes on, for a moment.

        One that failed, too, has all the time it needs: it may be writing its part of a checkpoint. All ranks diverge
        together, and it need not say so.
        """
        ending = asyncio.create_task(self._until_end(), name="end of training")
        await asyncio.wait({ending}, timeout=None if isinstance(error, Diverged) else _LAST_WORD_S)
        if self._ranks.has_failed(0):
            await asyncio.wait({ending})
        has_ended = ending.done()
        await cancelled(ending)
        return has_ended

    async def _until_end(self) -> None:
        while not isinstance(await self._next_order(), EndTraining):
            pass
        await self._written()

    async def _obey(self, order: Order, trainer: Trainer) -> None:
        match order:
            case TrainStep(step=step):
                await self._train(trainer, step)
            case TakeSnapshot(dtype=dtype):
                await self._in_thread(lambda: trainer.snapshot(dtype))
            case SaveCheckpoint(folder=folder):
                await self._written()
                staged = await self._in_thread(lambda: trainer.stage_checkpoint(Path(folder)))
                self._writing = self._writer.submit(trainer.write_checkpoint, staged)
            case RestoreCheckpoint(path=path):
                await self._in_thread(lambda: trainer.restore(Path(path)))
            case EndTraining():
                pass

    async def _train(self, trainer: Trainer, step: int) -> None:
        """Rank 0 has its rows of this batch, so this rank's are here or will be in a moment."""
        try:
            async with timeout(self._ranks.deadline_s):
                batch = await self._batches.receive()
        except TimeoutError:
            raise TransportError(
                f"rank {self._ranks.rank} did not get its rows of step {step} within {self._ranks.deadline_s:g} s"
            ) from None
        await self._in_thread(lambda: trainer.train_step(batch))
        await self._batches.acknowledge(step)

    async def _written(self) -> None:
        """Wait for this rank's part of the checkpoint before. Rank 0 reports one that cannot be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({asyncio.wrap_future(writing)})
            if (error := writing.exception()) is not None:
                _log.error("rank %d: %s", self._ranks.rank, error)

    async def _next_order(self) -> Order:
        return _ORDERS.decode(await self._in_thread(self._ranks.receive_order))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
