"""Files that hold many payloads each, written from left to right, and again from the left once all are released.

    slab      [64: header][64: entry header][payload, padded to 64][64: entry header][payload] ...
    tallies   [generation, released, checksum] ...     a small file for all slabs of a writer, by their numbers

The process that owns slabs writes them, the one that keeps the ledger writes the tallies, so no two processes ever
write one file. A slab starts over, under the next generation, when as many of its payloads are released as it holds. An
entry's header repeats generation, size and kind, so a reference that is out of date, or made up, is seen to be one.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import sys
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.errors import CorruptData, NoRoom, PayloadLost
from tailrace.guards import guarded
from tailrace.records import PayloadRef
from tailrace.transport.room import reserve_room

ALIGNMENT_BYTES = 64
MAGIC = int.from_bytes(b"TRslab01", "little")
SLAB_SUFFIX, TALLIES_SUFFIX = ".slab", ".released"

_HEADER = struct.Struct("<QQ")  # magic, generation
_ENTRY = struct.Struct("<QQQ")  # generation, bytes, kind
_TALLY = struct.Struct("<QQQ")  # generation, released, checksum: it is read while it is written
_URI = re.compile(r"([a-z]+):([\w.-]{1,200}-\d{1,6}\.slab)@(\d{1,18})\+(\d{1,18})", re.ASCII)
_DTYPES = frozenset({"bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32"})
_SIZE_STEP_BYTES = 1 << 16


class PayloadAddress(msgspec.Struct, frozen=True):
    """What a reference's URI says: `store:slab@generation+offset`.

    >>> PayloadAddress.of(PayloadRef("memory:a-1.slab@3+64", "uint8", (2,)))
    PayloadAddress(store='memory', slab='a-1.slab', generation=3, offset=64)
    """

    store: str
    slab: str
    generation: int
    offset: int
    """Of the entry's header."""

    @classmethod
    def of(cls, ref: PayloadRef) -> PayloadAddress:
        """Where a reference points to. Raises `CorruptData` for one that points nowhere."""
        match = _URI.fullmatch(ref.uri)
        if match is None or match[2].startswith("."):
            raise CorruptData(f"{ref.uri[:200]!r} is no reference of a payload")
        return cls(match[1], match[2], int(match[3]), int(match[4]))

    def uri(self) -> str:
        """For a reference."""
        return f"{self.store}:{self.slab}@{self.generation}+{self.offset}"


class OwnedSlab:
    """A slab as its owner has it. In shared memory it stays mapped: a recycled page is then written at a copy's cost.

    Raises `NoRoom` when the folder has none for it.
    """

    def __init__(self, path: Path, size: int, *, is_mapped: bool) -> None:
        self.path, self.size = path, size
        self._number = _number_of(path)
        self.generation = self.payloads = self._end = 0
        self.withdrawn = 0
        """Payloads of which no reference was ever sent."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._view: NDArray[np.uint8] | None = None
        try:
            reserve_room(self._file, path.parent, size, advice="or set transport.payload_folder")
            if is_mapped:
                self._view = np.frombuffer(_mapped(self._file, mmap.ACCESS_WRITE), np.uint8)
                self.close()
        except (NoRoom, OSError):
            self.close()
            path.unlink(missing_ok=True)
            raise
        self.start_over()

    @property
    def room(self) -> int:
        """Bytes of the largest payload that still fits."""
        return self.size - self._end - ALIGNMENT_BYTES

    def start_over(self) -> None:
        """Forget every payload: references of earlier generations mean nothing from now on."""
        self.generation += 1
        self.payloads, self.withdrawn, self._end = 0, 0, ALIGNMENT_BYTES
        self._write(0, np.frombuffer(_HEADER.pack(MAGIC, self.generation), np.uint8))

    def append(self, array: NDArray[np.generic], shape: tuple[int, ...]) -> tuple[int, int]:
        """Write a contiguous array that fits and will be read in this shape; (generation, offset) of its entry."""
        offset, start = self._end, self._end + ALIGNMENT_BYTES
        entry = _ENTRY.pack(self.generation, array.nbytes, kind_of(str(array.dtype), shape))
        if array.nbytes:
            self._write(start, array.reshape(-1).view(np.uint8))
        self._write(offset, np.frombuffer(entry, np.uint8))
        self.payloads += 1
        self._end = start + -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self.generation, offset

    def is_released(self, tallies: Tallies) -> bool:
        """Whether all of its payloads are released."""
        return self.withdrawn + tallies.released(self._number, self.generation) == self.payloads

    def close(self) -> None:
        """Have no file open until it is written to again: its payloads may be held for long, in hundreds of slabs."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, offset: int, content: NDArray[np.uint8]) -> None:
        if self._view is not None:
            np.copyto(self._view[offset : offset + len(content)], content)
            return
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        rest = content.data
        while len(rest):
            written = os.pwrite(self._file, rest, offset)
            rest, offset = rest[written:], offset + written


class MappedSlab:
    """A slab as its readers have it. Raises `PayloadLost` where there is none and `CorruptData` for what is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise PayloadLost(f"there is no {path} (any more): {error.strerror}") from error
        try:
            self.size = os.fstat(file).st_size
            if self.size < 2 * ALIGNMENT_BYTES:
                raise CorruptData(f"{path} is too short to hold payloads")
            self._mapping = _mapped(file, mmap.ACCESS_READ)
        finally:
            os.close(file)
        if _HEADER.unpack_from(self._mapping, 0)[0] != MAGIC:
            raise CorruptData(f"{path} holds no payloads")

    def array(self, ref: PayloadRef, address: PayloadAddress) -> NDArray[np.generic]:
        """The payload, read-only. Raises `PayloadLost` for one of another generation, `CorruptData` for none at all."""
        num_bytes = checked_bytes(ref)
        start = address.offset + ALIGNMENT_BYTES
        if address.offset < ALIGNMENT_BYTES or address.offset % ALIGNMENT_BYTES or start + num_bytes > self.size:
            raise CorruptData(f"{ref.uri} lies outside of its file of {self.size:,} bytes")
        generation, size, kind = _ENTRY.unpack_from(self._mapping, address.offset)
        if _HEADER.unpack_from(self._mapping, 0)[1] != address.generation:
            raise PayloadLost(f"{ref.uri} was released: its file was written anew")
        if (generation, size, kind) != (address.generation, num_bytes, kind_of(ref.dtype, ref.shape)):
            raise CorruptData(f"{ref.uri} is not {ref.dtype}{list(ref.shape)}, or nothing begins there")
        count = num_bytes // np.dtype(ref.dtype).itemsize
        with guarded(f"{ref.uri} cannot be read"):
            return np.frombuffer(self._mapping, ref.dtype, count, start).reshape(ref.shape)


def slab_bytes_for(num_bytes: int) -> int:
    """Size of a slab with room for one payload of `num_bytes`.

    >>> slab_bytes_for(1 << 16)
    131072
    """
    return -(-(num_bytes + 2 * ALIGNMENT_BYTES) // _SIZE_STEP_BYTES) * _SIZE_STEP_BYTES


def checked_bytes(ref: PayloadRef) -> int:
    """Bytes of the array that a reference describes. Raises `CorruptData` for a type or shape that none has."""
    if ref.dtype not in _DTYPES or not all(0 <= extent < 2**48 for extent in ref.shape) or len(ref.shape) > 8:
        raise CorruptData(f"{ref.uri} is said to be {ref.dtype[:40]!r} of shape {list(ref.shape)[:8]}: no array is")
    return math.prod(ref.shape) * np.dtype(ref.dtype).itemsize


def kind_of(dtype: str, shape: tuple[int, ...]) -> int:
    """A number that hardly two types and shapes share."""
    return xxhash.xxh3_64_intdigest(f"{dtype}{list(shape)}".encode())


class Tallies:
    """How many payloads are released of each slab of a writer, as its file says now. One look for all of them."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError:  # none yet
            content = b""
        self._tallies = [*_TALLY.iter_unpack(content[: len(content) // _TALLY.size * _TALLY.size])]

    def released(self, number: int, generation: int) -> int:
        """Payloads that are released of a slab's generation."""
        if number >= len(self._tallies):
            return 0
        counted, released, checksum = self._tallies[number]
        is_meant = counted == generation and checksum == _checksum(counted, released)
        return int(released) if is_meant else 0


def slab_path(folder: Path, writer: str, number: int) -> Path:
    """The file of a writer's slab."""
    return folder / f"{writer}-{number}{SLAB_SUFFIX}"


def tallies_path(folder: Path, writer: str) -> Path:
    """The small file that says how many payloads of a writer's slabs are released."""
    return folder / f"{writer}{TALLIES_SUFFIX}"


def write_tally(slab: Path, generation: int, released: int) -> None:
    """Say how many are released. Only one process does so for a slab; what it says replaces what it said before."""
    path = tallies_path(slab.parent, slab.stem.rpartition("-")[0])
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        tally = _TALLY.pack(generation, released, _checksum(generation, released))
        os.pwrite(file, tally, _number_of(slab) * _TALLY.size)
    finally:
        os.close(file)


def _number_of(slab: Path) -> int:
    return int(slab.stem.rpartition("-")[2])


def _mapped(file: int, access: int) -> mmap.mmap:
    """All of an open file, which may be closed then. Before Python 3.13 a mapping keeps it open by a duplicate."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, 0, access=access, trackfd=False)
    return mmap.mmap(file, 0, access=access)


def _checksum(generation: int, released: int) -> int:
    return xxhash.xxh3_64_intdigest(generation.to_bytes(8, "little") + released.to_bytes(8, "little"))
