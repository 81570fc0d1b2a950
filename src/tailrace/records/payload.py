"""Arrays too big to travel with what they belong to: routed experts are gigabytes per step.

Such an array stays in a payload store, and a `PayloadRef` travels. A branch maps its positions to payloads by
`PayloadChunk`s, one for each turn: nothing is unpacked, joined or packed again as it grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

ExpertArray: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]
"""[num_tokens, num_moe_layers, top_k]: indices of experts, as narrow as the engine made them."""


class PayloadRef(msgspec.Struct, frozen=True):
    """Where a big array lies, instead of the array."""

    uri: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array.

        >>> PayloadRef("memory:1", "uint16", (3, 4, 2)).num_bytes
        48
        """
        count = np.dtype(self.dtype).itemsize
        for extent in self.shape:
            count *= extent
        return count


class PayloadChunk(msgspec.Struct, frozen=True):
    """Positions `start` to `end` (exclusive) of a token sequence: entries `offset` and following of `ref`."""

    start: int
    end: int
    ref: PayloadRef | None = None
    """None where nobody recorded anything, as for a boundary token, which no forward pass saw."""
    offset: int = 0


def chunks_before(end: int, chunks: Iterable[PayloadChunk]) -> tuple[PayloadChunk, ...]:
    """What the chunks hold of the positions before `end`.

    >>> [(chunk.start, chunk.end) for chunk in chunks_before(6, [PayloadChunk(0, 4), PayloadChunk(4, 9)])]
    [(0, 4), (4, 6)]
    """
    return tuple(msgspec.structs.replace(one, end=min(one.end, end)) for one in chunks if one.start < end)


OpenPayload: TypeAlias = Callable[[PayloadRef], NDArray[np.generic]]
"""The array that a reference means, usually a view of shared memory. Raises `TransportError`."""


class PayloadChunks:
    """Which positions of a growing sequence lie where. The first recorded wins: it is what sampling saw.

    Adding costs a few steps, whatever was added before: the work of a rollout is linear in its turns.

    >>> chunks = PayloadChunks()
    >>> first, second = (PayloadRef(f"memory:{index}", "uint8", (4, 1, 1)) for index in (1, 2))
    >>> chunks.add(PayloadChunk(0, 4, first))
    >>> chunks.add(PayloadChunk(3, 7, second))
    >>> [(chunk.start, chunk.end, chunk.offset) for chunk in chunks.covering(8)]
    [(0, 4, 0), (4, 7, 1), (7, 8, 0)]
    """

    __slots__ = ("_end", "_gaps", "_recorded")

    def __init__(self) -> None:
        self._recorded: list[PayloadChunk] = []
        self._gaps: list[tuple[int, int]] = []  # sorted stretches below `_end` that nobody recorded
        self._end = 0

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def add(self, chunk: PayloadChunk) -> None:
        """Take from `chunk` what nobody recorded before. Raises `ValueError` for one that ends before it starts."""
        if chunk.start < 0 or chunk.end < chunk.start or chunk.offset < 0:
            raise ValueError(f"a chunk of a payload goes from {chunk.start} to {chunk.end} at offset {chunk.offset}")
        if chunk.ref is None or chunk.start == chunk.end:
            return
        for start, end in self._claim(chunk.start, chunk.end):
            self._recorded.append(PayloadChunk(start, end, chunk.ref, chunk.offset + start - chunk.start))

    def covering(self, num_tokens: int) -> Iterator[PayloadChunk]:
        """Chunks that together are positions 0 to `num_tokens`, in order, those without a reference in between."""
        position = 0
        for chunk in sorted(self._recorded, key=attrgetter("start")):  # all but sorted already
            if chunk.start >= num_tokens:
                break
            if position < chunk.start:
                yield PayloadChunk(position, chunk.start)
            yield chunk if chunk.end <= num_tokens else msgspec.structs.replace(chunk, end=num_tokens)
            position = chunk.end
        if position < num_tokens:
            yield PayloadChunk(position, num_tokens)

    def _claim(self, start: int, end: int) -> list[tuple[int, int]]:
        """The stretches of `start` to `end` that were free, and are no more."""
        claimed, kept = [], []
        first = max(0, bisect_right(self._gaps, start, key=itemgetter(0)) - 1)
        last = first
        while last < len(self._gaps) and self._gaps[last][0] < end:
            gap_start, gap_end = self._gaps[last]
            taken = (max(gap_start, start), min(gap_end, end))
            if taken[0] < taken[1]:
                claimed.append(taken)
                kept += _nonempty([(gap_start, taken[0]), (taken[1], gap_end)])
            else:
                kept.append((gap_start, gap_end))
            last += 1
        self._gaps[first:last] = kept
        if end > self._end:
            claimed.append((max(start, self._end), end))
            self._gaps += _nonempty([(self._end, start)])
            self._end = end
        return claimed


def unrecorded(dtype: np.dtype[np.uint8] | np.dtype[np.uint16]) -> int:
    """What stands where nobody recorded an expert: the type's greatest number, which names none.

    >>> unrecorded(np.dtype(np.uint8))
    255
    """
    return int(np.iinfo(dtype).max)


def _nonempty(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(start, end) for start, end in stretches if start < end]
