"""A batch queue across two processes of one host.

    sender (orchestrator)                             receiver (trainer)
      writes a recycled segment file ── reference ──►   maps it, lends views
      recycles the segment           ◄── acknowledged ── gave the batch back

The sender binds its socket, owns the segment files and removes them. There are never more files than `capacity`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from pathlib import Path

import msgspec

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.observability.phases import phase
from tailrace.records import Batch
from tailrace.transport.batch_codec import batch_metadata, batch_tensors, read_batch
from tailrace.transport.batch_queue import require_capacity
from tailrace.transport.channels import Channel, decode, encode, wait_until
from tailrace.transport.segments import SegmentFile, map_segment, read_segment


class BatchRef(msgspec.Struct, frozen=True):
    """Where a batch lies."""

    step: int
    segment: str
    """Name of a file in the queue's folder."""
    sequence: int
    num_bytes: int


class BatchAcknowledged(msgspec.Struct, frozen=True):
    """The receiver is done with a segment's content."""

    step: int
    sequence: int


class SharedMemoryBatchSender:
    """The scheduler's end. Make it on a running event loop, before the receiver."""

    def __init__(self, address: str, folder: Path, *, capacity: int = 2, checksum_bodies: bool = False) -> None:
        require_capacity(capacity)
        self._folder, self._capacity, self._checksum_bodies = folder, capacity, checksum_bodies
        self._segments: list[SegmentFile] = []
        self._free: list[SegmentFile] = []
        self._sent: dict[int, SegmentFile] = {}
        self._sequence = 0
        self._turn = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._channel = Channel(
            address, bind=True, on_message=self._on_acknowledged, changed=self._changed, peer="batch queue's receiver"
        )

    async def send(self, batch: Batch) -> None:
        """See `BatchSender.send`; waits for the receiver to connect, too.

        Bytes are written in a thread. A send that is cancelled while they are goes out all the same.
        """
        async with self._turn:
            await wait_until(self._changed, lambda: bool(self._channel.failure) or self._is_ready)
            if self._channel.failure:
                raise self._channel.failure
            self._writing = asyncio.create_task(self._write_and_send(batch))
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """See `BatchSender.close`. Removes the segment files; what the receiver has mapped stays readable to it."""
        await self._channel.close()
        if self._writing:
            await asyncio.gather(self._writing, return_exceptions=True)
        for segment in self._segments:
            segment.close()
            segment.path.unlink(missing_ok=True)
        self._segments.clear()

    @property
    def _is_ready(self) -> bool:
        return self._channel.connected and self._writing is None and len(self._sent) < self._capacity

    async def _write_and_send(self, batch: Batch) -> None:
        """Waits for the thread that writes, never for the receiver."""
        segment = self._free.pop() if self._free else self._create_segment()
        self._sequence += 1
        sequence, step = self._sequence, batch.summary.step
        try:
            num_bytes = await asyncio.to_thread(self._write, segment, batch, sequence)
            self._channel.send(encode(BatchRef(step, segment.path.name, sequence, num_bytes)))
            self._sent[sequence] = segment
        finally:
            if sequence not in self._sent:
                self._free.append(segment)
            self._writing = None
            self._changed.set()

    def _write(self, segment: SegmentFile, batch: Batch, sequence: int) -> int:
        with phase("write_batch", num_bytes=batch.num_bytes):
            metadata = batch_metadata(batch, checksum_body=self._checksum_bodies)
            return segment.write(batch_tensors(batch), metadata, sequence)

    def _create_segment(self) -> SegmentFile:
        segment = SegmentFile(self._folder / f"batch-{os.getpid()}-{len(self._segments)}.safetensors")
        self._segments.append(segment)
        return segment

    def _on_acknowledged(self, message: bytes) -> None:
        segment = self._sent.pop(decode(message, BatchAcknowledged).sequence, None)
        if segment:
            self._free.append(segment)


class SharedMemoryBatchReceiver:
    """The trainer's end. Make it on a running event loop. Received arrays are read-only views of shared memory."""

    def __init__(self, address: str, folder: Path) -> None:
        self._folder = folder
        self._waiting: deque[BatchRef] = deque()
        self._received: dict[int, BatchRef] = {}
        self._mappings: dict[str, mmap.mmap] = {}
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._channel = Channel(
            address, bind=False, on_message=self._on_reference, changed=self._changed, peer="batch queue's sender"
        )

    async def receive(self) -> Batch:
        """See `BatchReceiver.receive`. What was accepted before the sender ended still comes."""
        async with self._turn:
            await wait_until(self._changed, lambda: bool(self._waiting or self._channel.failure))
            if not self._waiting:
                raise self._channel.failure or PeerGone("the batch queue is closed")
            ref = self._waiting[0]
            try:
                batch = await asyncio.to_thread(self._open, ref)
            except TransportError:
                self._waiting.popleft()
                raise
            self._received[ref.step] = self._waiting.popleft()
            return batch

    async def acknowledge(self, step: int) -> None:
        """See `BatchReceiver.acknowledge`."""
        ref = self._received.pop(step, None)
        if ref is None:
            raise TransportError(f"the batch of step {step} cannot be acknowledged: it is not being trained on")
        self._channel.send(encode(BatchAcknowledged(step, ref.sequence)))

    async def close(self) -> None:
        """See `BatchReceiver.close`."""
        await self._channel.close()
        async with self._turn:
            self._waiting.clear()
            self._mappings.clear()

    def _open(self, ref: BatchRef) -> Batch:
        path = self._folder / ref.segment
        if path.parent != self._folder or not path.name.startswith("batch-"):
            raise CorruptData(f"a batch reference names a file outside its folder: {ref.segment!r}")
        segment = read_segment(path, self._map(path))
        if segment.sequence != ref.sequence:
            raise CorruptData(f"{path} holds content {segment.sequence}, and the reference means {ref.sequence}")
        batch = read_batch(path, segment)
        if batch.summary.step != ref.step:
            raise CorruptData(f"{path} holds the batch of step {batch.summary.step}, not of step {ref.step}")
        return batch

    def _map(self, path: Path) -> mmap.mmap:
        """The file's mapping, kept from last time unless the file's size changed."""
        mapping = self._mappings.get(path.name)
        if mapping is None or not path.exists() or path.stat().st_size != len(mapping):
            mapping = self._mappings[path.name] = map_segment(path)
        return mapping

    def _on_reference(self, message: bytes) -> None:
        self._waiting.append(decode(message, BatchRef))


class SharedMemoryBatchQueue:
    """Both ends in one process, through the same files and sockets."""

    def __init__(self, address: str, folder: Path, *, capacity: int = 2, checksum_bodies: bool = False) -> None:
        self._sender = SharedMemoryBatchSender(address, folder, capacity=capacity, checksum_bodies=checksum_bodies)
        self._receiver = SharedMemoryBatchReceiver(address, folder)

    async def send(self, batch: Batch) -> None:
        """See `BatchSender.send`."""
        await self._sender.send(batch)

    async def receive(self) -> Batch:
        """See `BatchReceiver.receive`."""
        return await self._receiver.receive()

    async def acknowledge(self, step: int) -> None:
        """See `BatchReceiver.acknowledge`."""
        await self._receiver.acknowledge(step)

    async def close(self) -> None:
        """See `BatchSender.close`."""
        await self._receiver.close()
        await self._sender.close()
