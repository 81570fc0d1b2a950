"""A batch queue across processes: references by socket, bytes wherever the store has them.

    sender (orchestrator)                                receiver (one rank of the trainer)
      store.write, in a thread ──── reference (+ bytes) ────► source.open, in a thread: maps it, lends views
      store.release            ◄─── acknowledged (every rank) gave its part back

The sender binds one socket for each rank. A batch counts against `capacity` until every rank has acknowledged it.
A sender that retains batches outlives its receivers: those that come in their place are sent again what lies in the
store since the newest checkpoint.

    acknowledged ──► retained ──► released: a checkpoint contains its step, or newer batches need its room
                        └── reconnect, resume_after(step) ──► sent again, with the version that its step ended with
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from typing_extensions import override

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.records import Batch, PlannedBatch
from tailrace.tracing.phases import phase
from tailrace.transport.batches.queue import BatchReceiver, BatchSender, not_received, require_capacity, require_ranks
from tailrace.transport.batches.stores import BatchRef, BatchSource, BatchStore, Piece
from tailrace.transport.channels import Channel, Conversation, OpenChannel, decode, encode, wait_until
from tailrace.transport.payloads.accounts import PayloadAccounts


class BatchAcknowledged(msgspec.Struct, frozen=True):
    """A rank is done with its part of a batch."""

    sequence: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A batch that lies in the store."""

    sequence: int
    step: int
    pieces: Sequence[Piece]
    num_bytes: int = 0
    """What it takes while it is retained, with the payloads that it refers to."""


class ChannelBatchSender(BatchSender):
    """The scheduler's end. Make it on a running event loop, before the receivers."""

    def __init__(
        self,
        address: str,
        store: BatchStore,
        *,
        num_ranks: int = 1,
        ranks_per_row: int = 1,
        capacity: int = 2,
        retained_bytes: int | None = None,
        open_channel: OpenChannel = Channel,
    ) -> None:
        """`num_ranks` receivers share the batches, each with its own part, `capacity` of them at a time.

        So many neighbours among the ranks open the same rows: what is planned for one data-parallel rank. Batches are
        retained where `retained_bytes` says how many bytes of them; None: they are released once acknowledged.
        """
        require_capacity(capacity)
        self._store, self._num_ranks, self._capacity = store, num_ranks, capacity
        self._open_channel = open_channel
        self._ranks_per_row = ranks_per_row
        self._unsent = deque[_Written]()  # again, to receivers that came in others' place
        self._sequence = 0
        self._sent: dict[int, set[int]] = {}  # ranks that have not given it back, by sequence number
        self.payloads: PayloadAccounts | None = None  # of what batches refer to, kept while those are retained
        self._retained_bytes = retained_bytes
        self._retained = OrderedDict[int, _Written]()  # all that is not released, the oldest first
        self._taken_bytes = 0  # by those
        self._releasing: asyncio.Task[None] | None = None  # what the newest checkpoint contains
        self._versions: dict[int, int] = {}  # after steps that no checkpoint contains
        self._messages: dict[int, list[int]] = {}  # numbers of the channels' messages, by sequence number
        self._saved_step = 0
        self._newest_step = 0
        self._is_paused = False  # receivers are to say first where they go on
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._changed = asyncio.Event()
        self._channels = self._bind(address)
        self._offering = asyncio.create_task(self._offer(), name="batches that wait for receivers")

    def _bind(self, address: str) -> list[Conversation]:
        return [
            self._open_channel(
                rank_address(address, rank),
                bind=True,
                on_message=partial(self._on_acknowledged, rank),
                changed=self._changed,
                peer=f"batch queue's receiver of rank {rank}",
            )
            for rank in range(self._num_ranks)
        ]

    @override
    async def send(self, batch: PlannedBatch) -> None:
        """Waits for every receiver to connect, too.

        Bytes are written in a thread. A send that is cancelled while they are goes out all the same.
        """
        require_ranks(batch, self._num_ranks // self._ranks_per_row)
        async with self._turn:
            await wait_until(self._changed, lambda: self._failure is not None or self._is_ready)
            if self._failure:
                raise self._failure
            self._writing = asyncio.create_task(self._write_and_send(batch))
            await asyncio.shield(self._writing)

    async def reconnect(self, address: str) -> None:
        """The receivers are gone, and others come to `address`: nothing is sent before `resume_after`."""
        self._is_paused = True
        gone, self._channels = self._channels, self._bind(address)
        self._sent.clear()
        self._messages.clear()
        await asyncio.gather(*(channel.close() for channel in gone))

    def resume_after(self, step: int) -> int:
        """The receivers go on after `step`: send them all later batches again; returns how many.

        Raises `TransportError` where one of those is not retained any more.
        """
        again = [written for written in self._retained.values() if written.step > step]
        if self._newest_step > step and (not again or again[0].step != step + 1):
            last = again[0].step - 1 if again else self._newest_step
            raise TransportError(f"the batches of steps {step + 1} to {last} are not kept any more")
        self._unsent = deque(again)
        self._is_paused = False
        self._changed.set()
        return len(again)

    def step_ended(self, step: int, version: int) -> None:
        """The receivers have `version` after this step: those that are sent its batch again are told so."""
        if self._retains:
            self._versions[step] = version

    def saved(self, step: int) -> None:
        """A durable checkpoint contains `step`: release it and all before."""
        self._saved_step = max(step, self._saved_step)
        self._versions = {one: version for one, version in self._versions.items() if one > self._saved_step}
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release_saved(), name="batches that a checkpoint contains")

    @override
    async def close(self) -> None:
        """What a receiver has opened stays readable to it."""
        self._is_closed = True
        self._changed.set()
        await asyncio.gather(*(channel.close() for channel in self._channels))
        tasks = [task for task in (self._offering, self._writing, self._releasing) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._store.close)

    @property
    def _failure(self) -> TransportError | None:
        """What ended the queue. Receivers that are gone do not, where others may come."""
        if self._is_closed:
            return PeerGone("the batch queue is closed")
        failures = (channel.failure for channel in self._channels if channel.failure)
        return next((one for one in failures if not (self._retains and isinstance(one, PeerGone))), None)

    @property
    def _retains(self) -> bool:
        return self._retained_bytes is not None

    @property
    def _has_room(self) -> bool:
        """Whether the receivers are there, and have given back enough."""
        is_connected = not self._is_paused and all(one.connected and not one.failure for one in self._channels)
        return is_connected and len(self._sent) < self._capacity

    @property
    def _is_ready(self) -> bool:
        return self._has_room and self._writing is None and not self._unsent

    async def _write_and_send(self, batch: PlannedBatch) -> None:
        """Waits for the thread that writes, never for a receiver."""
        sequence = self._sequence = self._sequence + 1
        try:
            write = partial(contextvars.copy_context().run, self._write, batch, sequence)  # a phase inside of this one
            pieces = await asyncio.get_running_loop().run_in_executor(self._thread, write)
            owners = dict.fromkeys(sample.rollout_id for sample in batch.samples)
            kept = self.payloads.keep(sequence, owners) if self._retains and self.payloads else 0
            num_bytes = kept + sum(piece.num_bytes for piece in pieces)
            written = _Written(sequence, batch.summary.step, pieces, num_bytes)
            if self._retains:
                self._retained[sequence] = written
                self._taken_bytes += num_bytes
            self._newest_step = written.step
            if self._retains and not self._has_room:  # the receivers went away meanwhile
                self._unsent.append(written)
            else:
                self._send_out(written)
        finally:
            if sequence not in self._sent and sequence not in self._retained:
                self._release(sequence)
            self._writing = None
            self._changed.set()

    def _write(self, batch: PlannedBatch, sequence: int) -> Sequence[Piece]:
        with phase("write_batch", num_bytes=batch.num_bytes):
            return self._store.write(batch, sequence)

    async def _offer(self) -> None:
        """Waits for batches that could not be sent at once, and for receivers and room; ends with the queue."""
        while True:
            await wait_until(self._changed, lambda: self._failure is not None or bool(self._unsent and self._has_room))
            if self._failure:
                return
            self._send_out(self._unsent.popleft())
            self._changed.set()

    def _send_out(self, written: _Written) -> None:
        each = (piece for piece in written.pieces for _ in range(self._ranks_per_row))
        version = self._versions.get(written.step)
        try:
            for channel, piece in zip(self._channels, each, strict=True):
                channel.send(encode(msgspec.structs.replace(piece.ref, version_after=version)), piece.body)
        except TransportError as error:
            if not self._retains:  # nobody is there, noticed or not
                raise error if channel.failure else PeerGone(str(error)) from error
            self._unsent.appendleft(written)
            self._is_paused = True  # the receivers are gone, and nobody has noticed yet
        else:
            self._sent[written.sequence] = set(range(self._num_ranks))
            self._messages[written.sequence] = [channel.num_sent for channel in self._channels]

    def _on_acknowledged(self, rank: int, message: bytes) -> None:
        sequence = decode(message, BatchAcknowledged).sequence
        waited_for = self._sent.get(sequence, set())
        waited_for.discard(rank)
        if sequence in self._sent and not waited_for:
            del self._sent[sequence]
            retained = self._retained.get(sequence)
            if retained is None or retained.step <= self._saved_step:
                self._release(sequence)
            else:
                self._make_room()

    def _make_room(self) -> None:
        """Let go of the oldest that were acknowledged, while what is retained has too many bytes."""
        while self._taken_bytes > (self._retained_bytes or 0):
            oldest = next(iter(self._retained.values()))
            if oldest.sequence in self._sent or oldest in self._unsent:
                return
            self._release(oldest.sequence)

    async def _release_saved(self) -> None:
        """What the newest checkpoint contains, one in a turn of the event loop: there may be thousands.

        Those that receivers have not given back are the newest, and released once they have.
        """
        while not self._is_closed and (oldest := next(iter(self._retained.values()), None)) is not None:
            if oldest.step > self._saved_step or oldest.sequence in self._sent:
                return
            self._release(oldest.sequence)
            await asyncio.sleep(0)

    def _release(self, sequence: int) -> None:
        if (written := self._retained.pop(sequence, None)) is not None:
            self._taken_bytes -= written.num_bytes
        if self.payloads is not None:
            self.payloads.let_go(sequence)
        for channel, number in zip(self._channels, self._messages.pop(sequence, ()), strict=False):
            channel.release(number)
        self._thread.submit(self._store.release, sequence)


class ChannelBatchReceiver(BatchReceiver):
    """The end of one rank, for what was planned for its data-parallel one. Make it on a running event loop.

    Received arrays are read-only views.
    """

    def __init__(
        self,
        address: str,
        source: BatchSource,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        ranks_per_row: int = 1,
        open_channel: OpenChannel = Channel,
    ) -> None:
        self._source = source
        self._part = (rank // ranks_per_row, num_ranks // ranks_per_row)
        self._waiting: deque[tuple[BatchRef, memoryview | None]] = deque()
        self._body: memoryview | None = None
        self._received: dict[int, BatchRef] = {}
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._channel = open_channel(
            rank_address(address, rank),
            bind=False,
            on_message=self._on_reference,
            on_body=self._on_body,
            changed=self._changed,
            peer="batch queue's sender",
        )

    @override
    async def receive(self) -> Batch:
        """What was accepted before the sender ended still comes."""
        async with self._turn:
            await wait_until(self._changed, lambda: bool(self._waiting or self._channel.failure))
            if not self._waiting:
                raise self._channel.failure or PeerGone("the batch queue is closed")
            ref, body = self._waiting[0]
            try:
                batch = await asyncio.to_thread(self._open, ref, body)
            except TransportError:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
            self._received[ref.step] = ref
            return batch

    @override
    async def acknowledge(self, step: int) -> None:
        ref = self._received.pop(step, None)
        if ref is None:
            raise not_received(step)
        self._channel.send(encode(BatchAcknowledged(ref.sequence)))

    @override
    async def close(self) -> None:
        await self._channel.close()
        async with self._turn:
            self._waiting.clear()
            self._source.close()

    def _open(self, ref: BatchRef, body: memoryview | None) -> Batch:
        with phase("open_batch", num_bytes=ref.num_bytes):
            batch = self._source.open(ref, body)
        if (batch.rank, batch.num_ranks) != self._part:
            raise CorruptData(
                f"data-parallel rank {self._part[0]} of {self._part[1]} was sent the rows of rank {batch.rank} of "
                f"{batch.num_ranks}"
            )
        return replace(batch, version_after=ref.version_after)

    def _on_body(self, body: memoryview) -> None:
        self._body = body

    def _on_reference(self, message: bytes) -> None:
        body, self._body = self._body, None
        self._waiting.append((decode(message, BatchRef), body))


def rank_address(address: str, rank: int) -> str:
    """Where one rank's conversation is: a socket beside the queue's, or the port after its port.

    >>> rank_address("ipc:///run/batches", 2), rank_address("tcp://10.0.0.1:5000", 2)
    ('ipc:///run/batches-2', 'tcp://10.0.0.1:5002')
    """
    if address.startswith("tcp:"):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{address}-{rank}"
