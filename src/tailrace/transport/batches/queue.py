"""Batches on their way from the scheduler to the ranks of the trainer.

    send ──► accepted ──► receive (each rank its own rows) ──► (training) ──► acknowledge (every rank) ──► forgotten
             └─────────────────── at most `capacity` of them ───────────────────┘

`send` waits for an acknowledgement while `capacity` batches have none; `receive` waits for a send; where the queue ends
both raise `PeerGone`. What is sent is a plan over branches (`PlannedBatch`): its bytes move once, in a thread, to where
the trainer maps or receives them (`Batch`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from typing_extensions import override

from tailrace.errors import PeerGone, TransportError
from tailrace.records import Batch, PlannedBatch
from tailrace.tracing.phases import phase
from tailrace.transport.channels import wait_until


class BatchSender(Protocol):
    """The scheduler's end of a batch queue."""

    async def send(self, batch: PlannedBatch) -> None:
        """Return once the batch is accepted; wait while `capacity` batches are unacknowledged.

        Costs the event loop no more for a large batch than for a small one. Raises `PeerGone` when the queue was
        closed or a receiving process ended, and `ValueError` for a batch that was planned for other ranks.
        """
        ...

    async def close(self) -> None:
        """End the queue: all waits on it raise `PeerGone`. Closing twice does nothing."""
        ...


class BatchReceiver(Protocol):
    """The end of one rank of the trainer."""

    async def receive(self) -> Batch:
        """This rank's rows of the oldest batch that it has not received. Cancelling the wait loses nothing.

        Raises `PeerGone` when the queue was closed or the sending process ended, and `CorruptData`.
        """
        ...

    async def acknowledge(self, step: int) -> None:
        """Give this rank's part of the batch of `step` back. Its arrays may be overwritten from now on.

        Raises `TransportError` for a batch that was not received or is acknowledged already.
        """
        ...

    async def close(self) -> None:
        """End the queue: all waits on it raise `PeerGone`. Closing twice does nothing."""
        ...


class MemoryBatchQueue(BatchSender):
    """A batch queue within one event loop: the sender's end, and `receiver(rank)` for each of the others."""

    def __init__(self, capacity: int = 2, *, num_ranks: int = 1) -> None:
        require_capacity(capacity)
        self._capacity, self._num_ranks = capacity, num_ranks
        self._unacknowledged: dict[int, set[int]] = {}  # ranks that have not given it back, by number of the batch
        self._sent = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._receivers = [_MemoryReceiver(self, rank) for rank in range(num_ranks)]

    @override
    async def send(self, batch: PlannedBatch) -> None:
        require_ranks(batch, self._num_ranks)
        await wait_until(self._changed, lambda: self._closed or len(self._unacknowledged) < self._capacity)
        self._require_open()
        self._sent += 1
        self._unacknowledged[self._sent] = set(range(self._num_ranks))
        for receiver in self._receivers:
            receiver.waiting.append((self._sent, batch))
        self._changed.set()

    def receiver(self, rank: int = 0) -> BatchReceiver:
        """The end of one rank."""
        return self._receivers[rank]

    @override
    async def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def wait_for(self, waiting: deque[tuple[int, PlannedBatch]]) -> tuple[int, PlannedBatch]:
        """The first of those; stays there."""
        await wait_until(self._changed, lambda: self._closed or bool(waiting))
        self._require_open()
        return waiting[0]

    def acknowledge(self, number: int, rank: int) -> None:
        """One rank is done with one batch."""
        self._unacknowledged[number].remove(rank)
        if not self._unacknowledged[number]:
            del self._unacknowledged[number]
            self._changed.set()

    def _require_open(self) -> None:
        if self._closed:
            raise PeerGone("the batch queue is closed")


class _MemoryReceiver(BatchReceiver):
    def __init__(self, queue: MemoryBatchQueue, rank: int) -> None:
        self.waiting: deque[tuple[int, PlannedBatch]] = deque()
        self._queue, self._rank = queue, rank
        self._received: dict[int, int] = {}  # number of the batch by step
        self._turn = asyncio.Lock()

    @override
    async def receive(self) -> Batch:
        async with self._turn:
            number, planned = await self._queue.wait_for(self.waiting)
            batch = await asyncio.to_thread(self._assemble, planned)
            self._received[batch.summary.step] = number
            self.waiting.popleft()
            return batch

    def _assemble(self, planned: PlannedBatch) -> Batch:
        with phase("write_batch", num_bytes=planned.num_bytes):
            return planned.assembled(self._rank)

    @override
    async def acknowledge(self, step: int) -> None:
        number = self._received.pop(step, None)
        if number is None:
            raise not_received(step)
        self._queue.acknowledge(number, self._rank)

    @override
    async def close(self) -> None:
        await self._queue.close()


def require_capacity(capacity: int) -> None:
    """Raise `ValueError` unless a queue of this many batches can hold one."""
    if capacity < 1:
        raise ValueError(f"a batch queue's capacity is {capacity}; it must be 1 or above")


def require_ranks(batch: PlannedBatch, num_ranks: int) -> None:
    """Raise `ValueError` for a batch that was planned for another number of ranks."""
    if batch.num_ranks != num_ranks:
        raise ValueError(f"a batch for {batch.num_ranks} ranks was sent to a queue of {num_ranks}")


def not_received(step: int) -> TransportError:
    """The error for a batch that a rank cannot give back."""
    return TransportError(f"the batch of step {step} cannot be acknowledged: it is not being trained on")
