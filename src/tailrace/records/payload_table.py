"""Where the payloads of a batch's tokens lie: the chunks of its samples in one table of integers."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import CorruptData, PayloadLost
from tailrace.records.arrays import Int32Array
from tailrace.records.payload import ExpertArray, OpenPayload, PayloadChunk, PayloadRef, unrecorded

MOST_EXPERTS = 1 << 16
"""Experts of one token over all layers; what claims more is none, and would take more memory than there is."""

UNRECORDED = -1
"""In a table, in place of a payload's index: the positions of this chunk were not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class PayloadTable:
    """The chunks of many samples, laid side by side as their tokens are.

    Either nothing was recorded at all and the table is empty, or its chunks are all of the tokens, each once, in order;
    none reaches over the edge of a sample.
    """

    chunks: Int32Array = field(default_factory=lambda: np.empty((0, 4), np.int32))
    # [num_chunks, 4]: first token, end (exclusive), payload or UNRECORDED, its first entry
    payloads: tuple[PayloadRef, ...] = ()

    def __bool__(self) -> bool:
        return len(self.chunks) > 0

    def is_sound(self, sample_offsets: Int32Array) -> bool:
        """Whether its chunks cover samples at these offsets ([num_samples + 1]) and fit its payloads' shapes."""
        entries = [_num_entries(ref) for ref in self.payloads]
        if not self or min(entries, default=0) < 0:
            return not self and not self.payloads
        starts, ends, places, offsets = self.chunks.T.astype(np.int64)
        if places.min() < UNRECORDED or places.max() >= len(entries) or offsets.min() < 0:
            return False
        recorded = places != UNRECORDED
        lasts = np.asarray(entries, np.int64)[places[recorded]] - (offsets + ends - starts)[recorded]
        return bool(
            starts[0] == 0
            and ends[-1] == sample_offsets[-1]
            and np.all(starts[1:] == ends[:-1])
            and np.all(starts < ends)
            and np.all(lasts >= 0)
            and np.all(np.isin(sample_offsets[:-1], starts) | (np.diff(sample_offsets) == 0))
        )

    def between(self, start: int, end: int) -> PayloadTable:
        """The table of tokens `start` to `end`, which are samples' edges, counted from `start`; the same payloads."""
        if not self:
            return self
        first, last = np.searchsorted(self.chunks[:, 0], [start, end])
        chunks = self.chunks[first:last].copy()
        chunks[:, :2] -= start
        return PayloadTable(chunks, self.payloads)

    def read(
        self,
        open_payload: OpenPayload,
        *,
        out: NDArray[np.generic] | None = None,
        on_lost: Callable[[PayloadLost], None] | None = None,
    ) -> ExpertArray | None:
        """[num_tokens, num_moe_layers, top_k], each byte copied once; None where nothing was recorded.

        What nobody recorded reads `unrecorded(dtype)`. An `out` that fits, of at least as many tokens, is filled and
        its beginning returned: memory that was touched before costs a fraction of fresh memory. Raises `CorruptData`
        for payloads that do not fit together, and what `open_payload` raises; a `PayloadLost` goes to `on_lost` where
        there is one, and its positions read as unrecorded.
        """
        if not self.payloads or not self:
            return None
        filled = _room(out, int(self.chunks[-1, 1]), self.payloads[0])
        nothing = unrecorded(filled.dtype)
        for start, end, payload, offset in self.chunks.tolist():
            where = filled[start:end]
            if payload == UNRECORDED:
                where[...] = nothing
                continue
            try:
                where[...] = _entries(open_payload, self.payloads[payload], offset, where)
            except PayloadLost as lost:
                if on_lost is None:
                    raise
                on_lost(lost)
                where[...] = nothing
        return filled


class PayloadTableBuilder:
    """Makes the table of samples that lie side by side, one sample after the other.

    >>> ref = PayloadRef("memory:1", "uint8", (2, 1, 1))
    >>> builder = PayloadTableBuilder()
    >>> builder.add(2, (PayloadChunk(0, 2, ref),))
    >>> builder.add(3, ())
    >>> builder.table().chunks.tolist()
    [[0, 2, 0, 0], [2, 5, -1, 0]]
    """

    __slots__ = ("_chunks", "_num_tokens", "_places")

    def __init__(self) -> None:
        self._chunks = array("i")
        self._places: dict[PayloadRef, int] = {}
        self._num_tokens = 0

    def add(self, num_tokens: int, chunks: tuple[PayloadChunk, ...]) -> None:
        """The next sample, with its branch's chunks: all of its tokens, or () where nothing was recorded."""
        for chunk in chunks or ([PayloadChunk(0, num_tokens)] if num_tokens else []):
            place = UNRECORDED if chunk.ref is None else self._places.setdefault(chunk.ref, len(self._places))
            start, end = self._num_tokens + chunk.start, self._num_tokens + chunk.end
            self._chunks.extend((start, end, place, chunk.offset))
        self._num_tokens += num_tokens

    def table(self) -> PayloadTable:
        """What was added so far."""
        if not self._places:
            return PayloadTable()
        chunks = np.frombuffer(self._chunks.tobytes(), np.int32).reshape(-1, 4)
        return PayloadTable(chunks, tuple(self._places))


def _num_entries(ref: PayloadRef) -> int:
    """Tokens of a payload of experts; below 0 for a reference that means none."""
    is_one = ref.dtype in ("uint8", "uint16") and len(ref.shape) == 3 and min(ref.shape) >= 0
    is_one = is_one and ref.shape[1] * ref.shape[2] <= MOST_EXPERTS
    return ref.shape[0] if is_one else -1


def _room(out: NDArray[np.generic] | None, num_tokens: int, kind: PayloadRef) -> ExpertArray:
    dtype = np.dtype(kind.dtype)
    if dtype not in (np.uint8, np.uint16):
        raise CorruptData(f"routed experts are uint8 or uint16, not {kind.dtype}")
    if out is not None and out.dtype == dtype and out.shape[1:] == kind.shape[1:] and len(out) >= num_tokens:
        return out[:num_tokens]  # type: ignore[return-value]
    return np.empty((num_tokens, *kind.shape[1:]), dtype)


def _entries(
    open_payload: OpenPayload, ref: PayloadRef, offset: int, where: NDArray[np.generic]
) -> NDArray[np.generic]:
    """The entries from `offset` on that fill `where`."""
    entries = open_payload(ref)[offset : offset + len(where)]
    if (entries.dtype, entries.shape) != (where.dtype, where.shape):
        raise CorruptData(
            f"{ref.uri} should have {where.dtype}{list(where.shape)} from entry {offset} on, like the rest of its row; "
            f"it has {entries.dtype}{list(entries.shape)}"
        )
    return entries
