"""Batches on their way from the scheduler to the trainer.

    send ──► accepted ──► receive ──► (training) ──► acknowledge ──► forgotten
             └──────── at most `capacity` of them ────────┘

`send` waits while `capacity` batches are unacknowledged and is woken by an acknowledgement; `receive` waits while there
is nothing to receive and is woken by a send; both are woken by the end of the queue, and then raise `PeerGone`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from tailrace.errors import PeerGone, TransportError
from tailrace.records import Batch
from tailrace.transport.channels import wait_until


class BatchSender(Protocol):
    """The scheduler's end of a batch queue."""

    async def send(self, batch: Batch) -> None:
        """Return once the batch is accepted; wait while `capacity` batches are unacknowledged.

        Raises `PeerGone` when the queue was closed or the receiving process ended.
        """
        ...

    async def close(self) -> None:
        """End the queue: whoever waits on it is woken by `PeerGone`. Closing twice does nothing."""
        ...


class BatchReceiver(Protocol):
    """The trainer's end of a batch queue."""

    async def receive(self) -> Batch:
        """The oldest batch not yet received. Cancelling the wait loses nothing.

        Raises `PeerGone` when the queue was closed or the sending process ended, and `CorruptData`.
        """
        ...

    async def acknowledge(self, step: int) -> None:
        """Give the batch of `step` back. Its arrays may be overwritten from now on.

        Raises `TransportError` for a batch that was not received or is acknowledged already.
        """
        ...

    async def close(self) -> None:
        """End the queue: whoever waits on it is woken by `PeerGone`. Closing twice does nothing."""
        ...


class BatchQueue(BatchSender, BatchReceiver, Protocol):
    """Both ends of a batch queue, in one process."""


class MemoryBatchQueue:
    """A batch queue within one event loop. The receiver gets the very object that was sent."""

    def __init__(self, capacity: int = 2) -> None:
        require_capacity(capacity)
        self._capacity = capacity
        self._waiting: deque[Batch] = deque()
        self._received: set[int] = set()
        self._changed = asyncio.Event()
        self._closed = False

    async def send(self, batch: Batch) -> None:
        """See `BatchSender.send`."""
        await wait_until(self._changed, lambda: self._closed or self._unacknowledged < self._capacity)
        self._require_open()
        self._waiting.append(batch)
        self._changed.set()

    async def receive(self) -> Batch:
        """See `BatchReceiver.receive`."""
        await wait_until(self._changed, lambda: self._closed or bool(self._waiting))
        self._require_open()
        batch = self._waiting.popleft()
        self._received.add(batch.summary.step)
        return batch

    async def acknowledge(self, step: int) -> None:
        """See `BatchReceiver.acknowledge`."""
        if step not in self._received:
            raise TransportError(f"the batch of step {step} cannot be acknowledged: it is not being trained on")
        self._received.remove(step)
        self._changed.set()

    async def close(self) -> None:
        """See `BatchSender.close`."""
        self._closed = True
        self._changed.set()

    @property
    def _unacknowledged(self) -> int:
        return len(self._waiting) + len(self._received)

    def _require_open(self) -> None:
        if self._closed:
            raise PeerGone("the batch queue is closed")


def require_capacity(capacity: int) -> None:
    """Raise `ValueError` unless a queue of this many batches can hold one."""
    if capacity < 1:
        raise ValueError(f"a batch queue's capacity is {capacity}; it must be 1 or above")
