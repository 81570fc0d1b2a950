"""Named tensors in recycled shared memory files, in the safetensors layout.

    [8: length][header: JSON, padded with spaces][tensor][pad][tensor][pad] ... [rest][trailer: sequence, checksums]

Any safetensors reader can open such a file. The format allows no gaps, so alignment and the unused rest of a recycled
file are tensors of their own, named `__pad__...`. The trailer is a tensor too: it is zeroed first and written last, and
carries the sequence number of this content, the checksums (xxh3) of the header and of all tensors, and a 1, which says
that the latter is there: content that ends otherwise is refused. A reader trusts nothing else.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from tailrace.errors import CorruptData, TransportError
from tailrace.guards import guarded
from tailrace.transport.room import reserve_room

ALIGNMENT_BYTES = 64
MAX_BUFFERS_PER_WRITE = 256
"""`writev` takes 1,024. Between two calls the interpreter's lock is free, so that an event loop never waits long."""
_COPIED_AT_ONCE_BYTES = 1 << 18
"""Into memory: they are hashed then, and the interpreter's lock is free meanwhile."""
HASHED_AT_ONCE_BYTES = 4 << 20
PAD_PREFIX = "__pad__"


DTYPE_BYTES: Mapping[str, int] = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8},
}
"""Bytes of one element, by the format's name of its type."""

_LENGTH = struct.Struct("<Q")
_TRAILER = struct.Struct("<QQQQ")  # sequence, checksum of the header, of the tensors, _HAS_CHECKSUM
TRAILER_BYTES = _TRAILER.size
"""At a file's end: while they are zeros it holds no content."""
_HAS_CHECKSUM = 1
_TRAILER_NAME = "__trailer__"
_TRAILER_DTYPE = "U64"
_METADATA_NAME = "__metadata__"
_REST_NAME = f"{PAD_PREFIX}rest"
_SIZE_STEP_BYTES = 64 * 1024
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 16
_MAX_EXTENT = 1 << 56
_ADVICE = "set another folder for shared memory, or make the batch smaller"
_ZEROS = bytes(ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class TensorBuffers:
    """A tensor to be written: its bytes are those of `buffers` in order, wherever they lie now."""

    dtype: str
    shape: tuple[int, ...]
    buffers: Iterable[memoryview]
    """Contiguous, of any type; taken once, as they are written: they may be made on the way."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A file's content, mapped (or received) and checked. It may be read between the bounds of `tensors`."""

    mapping: mmap.mmap | memoryview
    tensors: Mapping[str, TensorEntry]
    """Without pads and trailer; offsets count from the start of `mapping`."""
    metadata: Mapping[str, str]
    sequence: int
    body: tuple[int, int]
    """Where the tensors begin and end."""
    body_checksum: int


class SegmentFile:
    """A file that is written again and again; it grows to the largest content and never shrinks.

    Recycling is the point: fresh shared memory costs many times more than memory that was touched before.
    """

    __slots__ = ("_file", "path")  # one for each batch until it is saved

    def __init__(self, path: Path, *, file: int | None = None) -> None:
        self.path = path
        self._file = _open(path) if file is None else file

    @classmethod
    def nameless(cls, name: str) -> SegmentFile:
        """One in private memory; `name` is for messages. It is gone once closed."""
        if hasattr(os, "memfd_create"):
            memory = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Nobody can make it shorter under a reader, for whom that would be a signal (SIGBUS), no error.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(Path(name), file=memory)
        with tempfile.TemporaryFile() as file:
            return cls(Path(name), file=os.dup(file.fileno()))

    def open(self) -> None:
        """Open it again, where it was closed and has a name."""
        if self._file < 0:
            self._file = _open(self.path)

    def fileno(self) -> int:
        """The open file's descriptor, for locks."""
        return self._file

    def write(self, tensors: Mapping[str, TensorBuffers], metadata: Mapping[str, str], sequence: int) -> int:
        """Replace the content; returns its bytes. `sequence` is above 0.

        Raises `NoRoom` when the folder has none; then the file holds no content, and its size is as before.
        """
        current = os.fstat(self._file).st_size
        if current:
            os.pwrite(self._file, bytes(_TRAILER.size), current - _TRAILER.size)
        layout = _Layout(tensors, metadata)
        size = layout.file_size(current)
        if size > current:
            reserve_room(self._file, self.path.parent, size, advice=_ADVICE)
        header = layout.header(size)
        digest = xxhash.xxh3_64()
        os.lseek(self._file, len(header), os.SEEK_SET)
        _write_all(self._file, layout.body_buffers(), digest)
        os.pwrite(self._file, header, 0)
        os.pwrite(self._file, _trailer(sequence, header, digest.intdigest()), size - _TRAILER.size)
        return layout.num_bytes

    def flush(self) -> None:
        """Have the content on the disk itself, where there is one."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SegmentMemory:
    """The same in memory of this process alone: no file is open for it, however many there are."""

    def __init__(self) -> None:
        self.content: mmap.mmap | None = None
        """Another one once it had to grow: who has the old one keeps it."""

    def write(self, tensors: Mapping[str, TensorBuffers], metadata: Mapping[str, str], sequence: int) -> int:
        """Replace the content; returns its bytes. `sequence` is above 0."""
        layout = _Layout(tensors, metadata)
        current = 0 if self.content is None else len(self.content)
        size = layout.file_size(current)
        if self.content is None or size > current:
            self.content = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        header, digest = layout.header(size), xxhash.xxh3_64()
        with memoryview(self.content) as memory:
            memory[: len(header)] = header
            hashed = end = len(header)
            for buffer in layout.body_buffers():
                if buffer.nbytes:
                    start, end = end, end + buffer.nbytes
                    memory[start:end] = buffer.cast("B")
                if end - hashed >= _COPIED_AT_ONCE_BYTES:
                    digest.update(memory[hashed:end])
                    hashed = end
            digest.update(memory[hashed:end])
            memory[size - _TRAILER.size : size] = _trailer(sequence, header, digest.intdigest())
        return layout.num_bytes


def _trailer(sequence: int, header: bytes, body_checksum: int) -> bytes:
    return _TRAILER.pack(sequence, xxhash.xxh3_64_intdigest(header), body_checksum, _HAS_CHECKSUM)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def pack_segment(tensors: Mapping[str, TensorBuffers], metadata: Mapping[str, str]) -> bytes:
    """The content of a file that is never recycled, as bytes: as short as it can be.

    Tensors begin at multiples of their own elements; the widest first, they need no pads.
    """
    layout = _Layout(tensors, metadata, is_packed=True)
    header, body = layout.header(layout.num_bytes), b"".join(layout.body_buffers())
    return b"".join((header, body, _trailer(1, header, xxhash.xxh3_64_intdigest(body))))


class _Layout:
    """Where everything goes, computed before anything is written."""

    def __init__(
        self, tensors: Mapping[str, TensorBuffers], metadata: Mapping[str, str], *, is_packed: bool = False
    ) -> None:
        self._tensors = tensors
        self._metadata = dict(metadata)
        self._entries: dict[str, TensorEntry] = {}
        self._pads: list[int] = []
        dtypes = [*(tensor.dtype for tensor in tensors.values()), _TRAILER_DTYPE]
        position = 0
        for (name, tensor), following in zip(tensors.items(), dtypes[1:], strict=True):
            end = position + tensor.num_bytes
            self._entries[name] = TensorEntry(tensor.dtype, tensor.shape, (position, end))
            position = _aligned(end, DTYPE_BYTES[following] if is_packed else ALIGNMENT_BYTES)
            self._pads.append(position - end)
            if position > end:
                self._entries[f"{PAD_PREFIX}{len(self._pads)}"] = _pad_entry(end, position)
        self._body_bytes = position
        # The rest's end is not known yet; a number of more digits than any real one keeps its place.
        longest = self._header_json(position + _TRAILER.size if is_packed else 10**18)
        alignment = DTYPE_BYTES[_TRAILER_DTYPE] if is_packed else ALIGNMENT_BYTES
        self._header_bytes = _aligned(len(longest) + _LENGTH.size, alignment)
        self.num_bytes = self._header_bytes + position + _TRAILER.size

    def file_size(self, current: int) -> int:
        """The size the file needs: as it is where that is enough, with room to grow where it was not."""
        if self.num_bytes <= current:
            return current
        wanted = self.num_bytes + self.num_bytes // 4 if current else self.num_bytes
        return -(-wanted // _SIZE_STEP_BYTES) * _SIZE_STEP_BYTES

    def header(self, file_size: int) -> bytes:
        """Length and JSON, for a file of this size."""
        json = self._header_json(file_size - self._header_bytes).ljust(self._header_bytes - _LENGTH.size)
        return _LENGTH.pack(len(json)) + json

    def body_buffers(self) -> Iterator[memoryview]:
        """Everything after the header but the rest and the trailer."""
        for (name, tensor), pad in zip(self._tensors.items(), self._pads, strict=True):
            num_bytes = 0
            for buffer in tensor.buffers:
                num_bytes += buffer.nbytes
                yield buffer
            if num_bytes != tensor.num_bytes:
                raise ValueError(
                    f"tensor {name!r} has {num_bytes} bytes in its buffers, and {tensor.num_bytes} by shape"
                )
            yield memoryview(_ZEROS)[:pad]

    def _header_json(self, body_end: int) -> bytes:
        trailer_start = body_end - _TRAILER.size
        header: dict[str, object] = {
            _METADATA_NAME: self._metadata,
            **self._entries,
            _REST_NAME: _pad_entry(self._body_bytes, trailer_start),
            _TRAILER_NAME: TensorEntry(_TRAILER_DTYPE, (_TRAILER.size // 8,), (trailer_start, body_end)),
        }
        return msgspec.json.encode(header)


def map_segment(path: Path, *, private: bool = False) -> mmap.mmap:
    """Map a whole file, read-only, or `private`: writable, with writes that stay in this mapping.

    Raises `TransportError` for a file that cannot be opened and `CorruptData` for one that is too short.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < _LENGTH.size + _TRAILER.size:
                raise CorruptData(f"{path} is too short to hold a header")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    except OSError as error:
        raise TransportError(f"cannot open {path}: {error.strerror}") from error


def read_segment(path: Path | str, mapping: mmap.mmap | memoryview) -> Segment:
    """Check a mapped file's trailer, header and bounds. Raises `CorruptData` for anything that does not add up.

    `path` is for messages only. Takes memory for the header alone, which is a part of the content.
    """
    if len(mapping) < _LENGTH.size + _TRAILER.size:
        raise CorruptData(f"{path} is too short to hold a header")
    trailer = _TRAILER.unpack_from(mapping, len(mapping) - _TRAILER.size)
    sequence, checksum, body_checksum, has_checksum = trailer
    if sequence == 0:
        raise CorruptData(f"{path} was not written to its end")
    (length,) = _LENGTH.unpack_from(mapping, 0)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(mapping) - _TRAILER.size:
        raise CorruptData(f"{path} says its header has {length:,} bytes; the file has {len(mapping):,}")
    header = bytes(mapping[:start])
    if xxhash.xxh3_64_intdigest(header) != checksum:
        raise CorruptData(f"the header of {path} is damaged: its checksum differs")
    if has_checksum != _HAS_CHECKSUM:
        raise CorruptData(f"{path} has no checksum of its tensors: its trailer ends in {has_checksum}, not in 1")
    entries, metadata = _parse_header(path, header[_LENGTH.size :])
    _require_gapless(path, entries, len(mapping) - start)
    tensors = {
        name: TensorEntry(entry.dtype, entry.shape, (start + entry.data_offsets[0], start + entry.data_offsets[1]))
        for name, entry in entries.items()
        if name not in (_REST_NAME, _TRAILER_NAME)
    }
    end = max((entry.data_offsets[1] for entry in tensors.values()), default=start)
    return Segment(
        mapping,
        {name: entry for name, entry in tensors.items() if not name.startswith(PAD_PREFIX)},
        metadata,
        sequence,
        (start, end),
        body_checksum,
    )


def read_safetensors(path: Path) -> Mapping[str, TensorBuffers]:
    """The tensors of a file that somebody else wrote in the format: views of a mapping. O(tensors).

    Raises `TransportError` for a file that cannot be opened, and `CorruptData` for one that is not what it says.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise TransportError(f"cannot open {path}: {error}") from error
    content = memoryview(mapping)
    length = _LENGTH.unpack_from(content)[0] if len(content) >= _LENGTH.size else _MAX_HEADER_BYTES + 1
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(content):
        raise CorruptData(f"{path} was cut short, or is no file of safetensors: it has {len(content):,} bytes")
    entries, _ = _parse_header(path, bytes(content[_LENGTH.size : start]))
    _require_gapless(path, entries, len(content) - start)
    return {
        name: TensorBuffers(
            entry.dtype, entry.shape, [content[start + entry.data_offsets[0] : start + entry.data_offsets[1]]]
        )
        for name, entry in entries.items()
    }


def verify_body(path: Path | str, segment: Segment) -> None:
    """Compare the tensors with their checksum. O(bytes). Raises `CorruptData` where it differs."""
    digest = xxhash.xxh3_64()
    start, end = segment.body
    with memoryview(segment.mapping) as content:
        for position in range(start, end, HASHED_AT_ONCE_BYTES):
            digest.update(content[position : min(end, position + HASHED_AT_ONCE_BYTES)])
    if digest.intdigest() != segment.body_checksum:
        raise CorruptData(f"the tensors of {path} are damaged: their checksum differs")


def _parse_header(path: Path | str, header: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    with guarded(f"the header of {path} is not one of safetensors"):
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA_NAME, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    return entries, metadata


def _require_gapless(path: Path | str, entries: Mapping[str, TensorEntry], body_bytes: int) -> None:
    """Every tensor has its shape's bytes, and together they are the body, once."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if entry.dtype not in DTYPE_BYTES or not _is_possible(entry.shape):
            raise CorruptData(f"tensor {name!r} of {path} has an impossible type or shape: {entry}")
        if start != position or end - start != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
            raise CorruptData(f"tensor {name!r} of {path} does not lie where its header says: {entry}")
        position = end
    if position != body_bytes:
        raise CorruptData(f"{path} describes {position:,} bytes of tensors and holds {body_bytes:,}")


def _is_possible(shape: tuple[int, ...]) -> bool:
    """Whether the product of a shape is a number that can be computed in no time."""
    return len(shape) <= _MAX_DIMENSIONS and all(0 <= extent <= _MAX_EXTENT for extent in shape)


def _write_all(file: int, buffers: Iterator[memoryview], digest: xxhash.xxh3_64) -> None:
    """Gather all buffers into the file and the digest, going on where a call wrote less than it was given."""
    remaining = (buffer for buffer in buffers if buffer.nbytes)
    while chunk := list(itertools.islice(remaining, MAX_BUFFERS_PER_WRITE)):
        for buffer in chunk:
            digest.update(buffer.cast("B"))
        while chunk:
            written = os.writev(file, chunk)
            whole = 0
            while whole < len(chunk) and written >= chunk[whole].nbytes:
                written -= chunk[whole].nbytes
                whole += 1
            del chunk[:whole]
            if written:
                chunk[0] = chunk[0].cast("B")[written:]


def _aligned(position: int, alignment_bytes: int) -> int:
    return -(-position // alignment_bytes) * alignment_bytes


def _pad_entry(start: int, end: int) -> TensorEntry:
    return TensorEntry("U8", (end - start,), (start, end))
