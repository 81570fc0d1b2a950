"""Finished branches on their way to the orchestrator: large ones in recycled shared memory, small ones in the message.

    worker: branches ─► a free segment ─► Played(placed) ─► orchestrator: check, read ─► Taken ─► free again

Segments have no name: they belong to the two processes and are gone with them, however those end. Where none is free,
or the host has no room for one, branches go in the message.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.errors import CorruptData, NoRoom
from tailrace.guards import guarded
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.transport.channels import decode_array, encode
from tailrace.transport.segments import SegmentFile, TensorBuffers, read_segment, verify_body

SEGMENTS = 4
"""Of each worker; two rollouts seldom end in the time in which one is read."""
LARGE_BYTES = 1 << 17
"""Of a rollout's branches: from here on it is cheaper to write and map them than to send them."""

_NAME = "branches"
_DECODER = msgspec.msgpack.Decoder(list[BranchData], dec_hook=decode_array)


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where branches lie."""

    segment: int
    sequence: int
    """Of the segment's content."""


class BranchWriter:
    """The worker's side."""

    def __init__(self, files: Sequence[int]) -> None:
        """Over descriptors that `BranchReader.files` gave."""
        self._segments = [SegmentFile(Path(f"{_NAME} {number}"), file=file) for number, file in enumerate(files)]
        self._free = deque(range(len(files)))
        self._sequence = 0

    def place(self, branches: list[BranchData]) -> Placed | None:
        """Write them; None where they are small, or cannot be written there."""
        if not self._free or sum(one.num_bytes for one in branches) < LARGE_BYTES:
            return None
        body = encode(branches)
        number = self._free.popleft()
        self._sequence += 1
        tensors = {_NAME: TensorBuffers("U8", (len(body),), [memoryview(body)])}
        try:
            self._segments[number].write(tensors, {}, self._sequence)
        except NoRoom:
            self._free.append(number)
            return None
        except OSError:  # users' code has closed the file, which is never tried again
            return None
        return Placed(number, self._sequence)

    def taken(self, segment: int) -> None:
        """What lay there was read."""
        self._free.append(segment)


class BranchReader:
    """The orchestrator's side, which makes the segments."""

    def __init__(self) -> None:
        self._segments = [SegmentFile.nameless(f"tailrace-{_NAME} {number}") for number in range(SEGMENTS)]
        self._mappings: list[mmap.mmap | None] = [None] * SEGMENTS

    @property
    def files(self) -> list[int]:
        """Descriptors for the worker."""
        return [segment.fileno() for segment in self._segments]

    def read(self, placed: Placed) -> list[BranchData]:
        """In memory of their own. Raises `CorruptData` for anything but what was written there."""
        where = f"shared memory of finished branches ({placed.segment})"
        if not 0 <= placed.segment < SEGMENTS:
            raise CorruptData(f"there is no {where}")
        mapping = self._mapping(placed.segment)
        segment = read_segment(where, mapping)
        verify_body(where, segment)
        if segment.sequence != placed.sequence or _NAME not in segment.tensors:
            raise CorruptData(f"{where} holds something else than what was written there last")
        start, end = segment.tensors[_NAME].data_offsets
        with guarded(f"{where} holds no branches"), memoryview(mapping) as content:
            return _DECODER.decode(content[start:end])

    def close(self) -> None:
        """No worker uses them any more."""
        for mapping in self._mappings:
            if mapping is not None:
                mapping.close()
        for segment in self._segments:
            segment.close()

    def _mapping(self, number: int) -> mmap.mmap:
        """Of the whole segment, which may have grown."""
        file, mapping = self._segments[number].fileno(), self._mappings[number]
        size = os.fstat(file).st_size
        if mapping is None or len(mapping) != size:
            if mapping is not None:
                mapping.close()
            with guarded("shared memory of finished branches cannot be mapped"):
                mapping = self._mappings[number] = mmap.mmap(file, size, access=mmap.ACCESS_READ)
        return mapping
