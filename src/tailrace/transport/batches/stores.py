"""Where the bytes of a batch lie between its sender and the ranks of the trainer.

    SharedMemoryStore   recycled files in a folder of shared memory, one for each rank and batch in flight
    FileStore           fresh files in a folder of any file system, published by one rename
    ValueStore          recycled memory of the sender's own, sent along whole: for hosts that share no folder

All of them write the same bytes (`segments`), each rank's part by itself, so that no rank opens another one's rows, and
a source trusts none of them before their checksum.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.errors import CorruptData, NoRoom
from tailrace.output_files import sync
from tailrace.records import Batch, PlannedBatch
from tailrace.transport.batches.codec import part_tensors, read_batch
from tailrace.transport.segments import SegmentFile, SegmentMemory, map_segment, read_segment, verify_body

SegmentT = TypeVar("SegmentT")

_logger = logging.getLogger(__name__)


class BatchRef(msgspec.Struct, frozen=True):
    """Where one rank's part of a batch is."""

    step: int
    segment: str
    """A file below the store's folder; nothing where the bytes come along."""
    sequence: int
    num_bytes: int
    version_after: int | None = None
    """As `Batch.version_after`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a batch, written."""

    ref: BatchRef
    body: mmap.mmap | None = None
    """To be sent along with the reference."""
    segment_bytes: int = 0
    """What its segment takes, which is recycled and may be larger than the content; 0 for a fresh file."""

    @property
    def num_bytes(self) -> int:
        """What it takes as long as it is kept."""
        return self.segment_bytes or self.ref.num_bytes


class BatchStore(Protocol):
    """The sender's side. Called from one thread at a time; `write` not from an event loop's."""

    def write(self, batch: PlannedBatch, sequence: int) -> Sequence[Piece]:
        """Write every rank's part; O(bytes). Raises `TransportError`; then, too, the batch is to be released."""
        ...

    def release(self, sequence: int) -> None:
        """Every rank has acknowledged this batch, or none has heard of it."""
        ...

    def close(self) -> None:
        """Remove what is left."""
        ...


class BatchSource(Protocol):
    """The side of one rank."""

    def open(self, ref: BatchRef, body: memoryview | None) -> Batch:
        """The part that a reference means. Raises `TransportError`, `CorruptData` among them."""
        ...

    def close(self) -> None:
        """Drop the mappings; arrays in use stay readable."""
        ...


class _RecyclingStore(BatchStore, Generic[SegmentT]):
    """Writes into segments that are used again once their batch is released."""

    def __init__(self, create: Callable[[int], SegmentT]) -> None:
        self._pool = _Pool(create)

    @override
    def write(self, batch: PlannedBatch, sequence: int) -> Sequence[Piece]:
        segments = enumerate(self._pool.take(sequence, batch.num_ranks))
        return [self._write(segment, batch.part(rank), sequence) for rank, segment in segments]

    @override
    def release(self, sequence: int) -> None:
        self._pool.release(sequence)

    @abstractmethod
    def _write(self, segment: SegmentT, part: PlannedBatch, sequence: int) -> Piece: ...


class SharedMemoryStore(_RecyclingStore[SegmentFile]):
    """Recycled files in a folder of shared memory: fresh shared memory costs many times the copy.

    What finds no room there goes to files in the folder `spill`, if there is one; the first time is logged. Those that
    a killed sender left there are removed: the memory beside them is gone.
    """

    def __init__(self, folder: Path, *, spill: Path | None = None) -> None:
        super().__init__(lambda number: SegmentFile(folder / f"{_BATCH}{os.getpid()}-{number}.safetensors"))
        self._spill, self._num_spilled = spill, 0
        for leftover in () if spill is None else spill.glob(f"{_SPILLED}*"):
            leftover.unlink(missing_ok=True)

    @override
    def close(self) -> None:
        """What a receiver has mapped stays readable to it."""
        for segment in self._pool.segments:
            segment.close()
            segment.path.unlink(missing_ok=True)
        if self._spill is not None:
            _remove_if_empty(self._spill)

    @override
    def _write(self, segment: SegmentFile, part: PlannedBatch, sequence: int) -> Piece:
        segment.open()
        try:
            ref = _write_part(segment, part, sequence, segment.path.name)
            return Piece(ref, segment_bytes=os.fstat(segment.fileno()).st_size)
        except NoRoom as error:
            if self._spill is None or segment.path.parent == self._spill:
                raise
            spilled = self._spilled(self._spill, error)
        finally:
            segment.close()  # it may be retained for long, beside hundreds of others
        self._pool.replace(sequence, segment, spilled)
        segment.path.unlink(missing_ok=True)
        return self._write(spilled, part, sequence)

    def _spilled(self, folder: Path, error: NoRoom) -> SegmentFile:
        """A file outside of shared memory, which takes the place of one in there."""
        if not self._num_spilled:
            _logger.warning("%s; meanwhile batches go through files in %s, which is slower", error, folder)
        self._num_spilled += 1
        folder.mkdir(parents=True, exist_ok=True)
        return SegmentFile(folder / f"{_SPILLED}{os.getpid()}-{self._num_spilled}.safetensors")


class ValueStore(_RecyclingStore[SegmentMemory]):
    """Recycled memory of this process, whose content is sent along."""

    def __init__(self) -> None:
        super().__init__(lambda _: SegmentMemory())

    @override
    def close(self) -> None:
        """What is on its way stays readable until it is sent."""

    @override
    def _write(self, segment: SegmentMemory, part: PlannedBatch, sequence: int) -> Piece:
        tensors, metadata = part_tensors(part)
        num_bytes = segment.write(tensors, metadata, sequence)
        assert segment.content is not None
        return Piece(BatchRef(part.summary.step, "", sequence, num_bytes), segment.content, len(segment.content))


class FileStore(BatchStore):
    """Fresh files, one folder for each batch, which is there with all its ranks' parts or not at all.

    What was accepted is on the disk. Leftovers are removed, at the start and at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    @override
    def write(self, batch: PlannedBatch, sequence: int) -> Sequence[Piece]:
        """On the disk when it returns."""
        name = f"{_BATCH}{sequence:08d}"
        folder = self._folder / f"{_HALF_WRITTEN}{sequence:08d}"
        folder.mkdir()
        pieces = [Piece(self._write(folder, name, batch, rank, sequence)) for rank in range(batch.num_ranks)]
        sync(folder)
        folder.rename(self._folder / name)
        sync(self._folder)
        return pieces

    @override
    def release(self, sequence: int) -> None:
        for name in (_BATCH, _HALF_WRITTEN):
            shutil.rmtree(self._folder / f"{name}{sequence:08d}", ignore_errors=True)

    @override
    def close(self) -> None:
        self._remove_leftovers()
        _remove_if_empty(self._folder)

    def _remove_leftovers(self) -> None:
        for beginning in (_HALF_WRITTEN, _BATCH):
            for leftover in self._folder.glob(f"{beginning}*"):
                shutil.rmtree(leftover)

    def _write(self, folder: Path, name: str, batch: PlannedBatch, rank: int, sequence: int) -> BatchRef:
        segment = SegmentFile(folder / _part_name(rank))
        try:
            ref = _write_part(segment, batch.part(rank), sequence, f"{name}/{_part_name(rank)}")
            segment.flush()
        finally:
            segment.close()
        return ref


class FileSource(BatchSource):
    """One rank's parts, mapped from files below a folder."""

    def __init__(self, folder: Path, *, recycled: bool = False, spill: Path | None = None) -> None:
        """`recycled`: of a `SharedMemoryStore` with the same folders, whose files hold one batch after the other, and
        stay mapped. Else of a `FileStore`."""
        self._folder, self._spill = folder, spill or folder
        self._recycled = recycled
        self._mappings: dict[str, mmap.mmap] = {}

    @override
    def open(self, ref: BatchRef, body: memoryview | None) -> Batch:
        if body is not None or not _PLACE.fullmatch(ref.segment):
            raise CorruptData(f"a batch reference names a file outside its folder: {ref.segment!r}")
        path = (self._spill if ref.segment.startswith(_SPILLED) else self._folder) / ref.segment
        content = self._map(path) if self._recycled else map_segment(path)
        return _read_part(path, content, ref)

    @override
    def close(self) -> None:
        self._mappings.clear()

    def _map(self, path: Path) -> mmap.mmap:
        """The file's mapping, kept from last time unless the file's size changed, or many others came since."""
        mapping = self._mappings.pop(path.name, None)
        if mapping is None or not path.exists() or path.stat().st_size != len(mapping):
            mapping = map_segment(path)
        self._mappings[path.name] = mapping
        if len(self._mappings) > _KEPT_MAPPINGS:  # of a sender that retains batches: all count as this process's memory
            del self._mappings[next(iter(self._mappings))]
        return mapping


class ValueSource(BatchSource):
    """One rank's parts, as they were received."""

    @override
    def open(self, ref: BatchRef, body: memoryview | None) -> Batch:
        if body is None:
            raise CorruptData(f"the batch of step {ref.step} came without its bytes")
        if np.frombuffer(body, np.uint8).ctypes.data % _ALIGNED_BYTES:  # a small one, in the middle of a buffer
            body = memoryview(bytes(body))
        return _read_part(f"the message of step {ref.step}", body, ref)

    @override
    def close(self) -> None: ...


_KEPT_MAPPINGS = 8
_ALIGNED_BYTES = 8
"""What columns need; where they were read from a mapping they lie on `segments.ALIGNMENT_BYTES`."""
_BATCH = "batch-"
_HALF_WRITTEN = ".half-written-batch-"
_SPILLED = "spilled-batch-"
_PLACE = re.compile(r"(?:spilled-)?batch-[\w.-]+(/rank-[0-9]+\.safetensors)?", re.ASCII)


class _Pool(Generic[SegmentT]):
    """Segments that are written, lent to a batch, and written again."""

    def __init__(self, create: Callable[[int], SegmentT]) -> None:
        self._create = create
        self.segments: list[SegmentT] = []
        self._free: list[SegmentT] = []
        self._lent: dict[int, list[SegmentT]] = {}

    def take(self, sequence: int, count: int) -> list[SegmentT]:
        """Segments for one batch: those given back last, whose memory is warm, and new ones where they are too few."""
        while len(self._free) < count:
            segment = self._create(len(self.segments))
            self.segments.append(segment)
            self._free.append(segment)
        lent = self._lent[sequence] = [self._free.pop() for _ in range(count)]
        return lent

    def release(self, sequence: int) -> None:
        """The segments of one batch are free again, the first rank's on top: each rank gets those it has mapped."""
        self._free += reversed(self._lent.pop(sequence, []))

    def replace(self, sequence: int, segment: SegmentT, other: SegmentT) -> None:
        """Have `other` in the place of a segment that a batch was lent."""
        for segments in (self.segments, self._lent[sequence]):
            segments[segments.index(segment)] = other


def _write_part(segment: SegmentFile, part: PlannedBatch, sequence: int, name: str) -> BatchRef:
    tensors, metadata = part_tensors(part)
    num_bytes = segment.write(tensors, metadata, sequence)
    return BatchRef(part.summary.step, name, sequence, num_bytes)


def _read_part(path: Path | str, content: mmap.mmap | memoryview, ref: BatchRef) -> Batch:
    segment = read_segment(path, content)
    if segment.sequence != ref.sequence:
        raise CorruptData(f"{path} holds content {segment.sequence}, and the reference means {ref.sequence}")
    verify_body(path, segment)
    batch = read_batch(path, segment)
    if batch.summary.step != ref.step:
        raise CorruptData(f"{path} holds the batch of step {batch.summary.step}, not of step {ref.step}")
    return batch


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # gone already, or not only batches lie there
        folder.rmdir()


def _part_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"
