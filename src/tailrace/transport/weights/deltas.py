"""What changed from one file to another of the same length: for a reader that has the first, and wants the second.

    first, second ── encode_delta ──► delta ── (a socket) ──► apply_delta(first) ── in place ──► second, bit for bit

A delta is the exclusive or of both files, in sections of `SECTION_BYTES`, each taken apart into four planes: every
fourth byte from the first, the second, the third and the fourth on. An element in bfloat16 is two bytes and one in
float32 four, so that upper bytes, which a small step leaves alone, are apart from lower ones. Of each plane there is

    nothing                                              where it is all zeros
    which bytes are not, a bit each; and those bytes     where few are not; both are deflated
    all of its bytes                                     otherwise

A delta does not know which file it belongs to: whoever sends it sends the digest of the result, too.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.errors import CorruptData
from tailrace.guards import guarded

SECTION_BYTES: Final = 1 << 20
"""Of the files, looked at at once: what that takes stays in cache, whatever the size of the model."""

_PLANES = 4
_FILE = struct.Struct("<Q")  # bytes of either file
_PLANE = struct.Struct("<BII")  # coding; bytes of the bits, and of the rest
_FEW = 8
"""One of so many, at most: more are sent faster as they are, and lower bytes of float32 cannot be deflated."""
_LEVEL = 1
_SAMPLES = 8
"""Sections that tell whether all others are worth the time."""

_Bytes: TypeAlias = NDArray[np.uint8]


class _Coding(enum.IntEnum):
    ZEROS = 0
    FEW = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Delta:
    """From one file to another."""

    content: bytes
    changed_bytes: int
    """Of the files' bytes, how many differ."""


def digest_of(content: memoryview) -> str:
    """Of a whole file, in hexadecimal. O(bytes), in 0.3 copies' time; other threads go on meanwhile."""
    return xxhash.xxh3_128_hexdigest(content)


def encode_delta(first: memoryview, second: memoryview, *, max_share: float = 1.0) -> Delta | None:
    """None where the files' lengths differ or are no multiple of 4, or more than `max_share` of it would be needed.

    O(bytes), but for files that a look at a few sections shows to be too different.
    """
    if len(first) != len(second) or len(first) % _PLANES:
        return None
    old, new = np.frombuffer(first, "<u4"), np.frombuffer(second, "<u4")
    sections = _sections(len(old), SECTION_BYTES // _PLANES)
    samples = sections[:: max(1, len(sections) // _SAMPLES)]
    sampled_bytes = sum(old[where].nbytes for where in samples)
    if sum(len(part) for where in samples for part in _encoded(old[where], new[where])[0]) > max_share * sampled_bytes:
        return None
    parts, changed_bytes = [_FILE.pack(len(first))], 0
    for where in sections:
        encoded, changed = _encoded(old[where], new[where])
        parts += encoded
        changed_bytes += changed
    content = b"".join(parts)
    return Delta(content, changed_bytes) if len(content) <= max_share * len(first) else None


def apply_delta(content: memoryview, delta: memoryview) -> None:
    """Make of the first file's `content` that of the second, in place.

    Raises `CorruptData` for what is no delta of a file of this length; then the content is of no use any more.
    """
    with guarded("a delta cannot be applied"):
        _apply(content, _Reader(delta))


def _apply(content: memoryview, reader: _Reader) -> None:
    if reader.take(_FILE.size) != _FILE.pack(len(content)):
        raise CorruptData(f"a delta is not one of a file of {len(content):,} bytes")
    target = np.frombuffer(content, np.uint8)
    for where in _sections(len(target), SECTION_BYTES):
        for plane in range(_PLANES):
            reader.flip(target[where][plane::_PLANES])
    reader.require_end()


def _sections(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _encoded(old: NDArray[np.uint32], new: NDArray[np.uint32]) -> tuple[Sequence[bytes], int]:
    """A section's part of the delta, and how many bytes differ."""
    flips, parts, changed = np.bitwise_xor(old, new), list[bytes](), 0
    is_equal = not flips.any()
    for plane in range(_PLANES):
        encoded, count = _NO_PLANE if is_equal else _plane((flips >> np.uint32(8 * plane)).astype(np.uint8))
        bits, rest, coding = encoded
        parts += (_PLANE.pack(coding, len(bits), len(rest)), bits, rest)
        changed += count
    return parts, changed


_NO_PLANE: Final = (b"", b"", _Coding.ZEROS), 0


def _plane(plane: _Bytes) -> tuple[tuple[bytes, bytes, _Coding], int]:
    differs = plane != 0
    count = int(np.count_nonzero(differs))
    if not count:
        return _NO_PLANE
    if count * _FEW > len(plane):
        return (b"", plane.tobytes(), _Coding.ALL), count
    bits = zlib.compress(np.packbits(differs).data, _LEVEL)
    return (bits, zlib.compress(plane[differs].data, _LEVEL), _Coding.FEW), count


class _Reader:
    """Takes a delta apart, from its beginning to its end."""

    def __init__(self, delta: memoryview) -> None:
        self._delta, self._position = delta, 0

    def take(self, num_bytes: int) -> memoryview:
        end = self._position + num_bytes
        if end > len(self._delta):
            raise CorruptData(f"a delta ends after {len(self._delta):,} bytes, in the midst of a section")
        taken, self._position = self._delta[self._position : end], end
        return taken

    def flip(self, plane: _Bytes) -> None:
        """Apply the next plane of the delta."""
        coding, bits, rest = _PLANE.unpack(self.take(_PLANE.size))
        match coding:
            case _Coding.ZEROS if not bits and not rest:
                pass
            case _Coding.ALL if not bits and rest == len(plane):
                plane ^= np.frombuffer(self.take(rest), np.uint8)
            case _Coding.FEW:
                packed = _inflated(self.take(bits), -(-len(plane) // 8))
                places = np.flatnonzero(np.unpackbits(packed, count=len(plane)).view(np.bool_))
                plane[places] ^= _inflated(self.take(rest), len(places))
            case _:
                raise CorruptData(f"a delta has a part of {rest:,} bytes of the unknown coding {coding}")

    def require_end(self) -> None:
        if self._position != len(self._delta):
            raise CorruptData(f"a delta of {len(self._delta):,} bytes goes on after its last section")


def _inflated(content: memoryview, num_bytes: int) -> _Bytes:
    """[num_bytes]; never much more, whatever was sent."""
    try:
        inflated = zlib.decompressobj().decompress(content, num_bytes + 1)
    except zlib.error as error:
        raise CorruptData(f"a part of a delta cannot be inflated: {error}") from error
    if len(inflated) != num_bytes:
        raise CorruptData(f"a part of a delta has {len(inflated):,} bytes or more instead of {num_bytes:,}")
    return np.frombuffer(inflated, np.uint8)
