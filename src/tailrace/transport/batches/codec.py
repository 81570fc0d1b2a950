"""One rank's part of a batch as named tensors, and back: every column is one tensor, the summary is metadata.

Writing gathers the columns of tokens from the branches they lie in. Reading copies nothing and trusts nothing: types,
lengths and the row plan are checked before a batch exists, the plan against a checksum of its own, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.errors import CorruptData
from tailrace.guards import guarded
from tailrace.records import (
    SUPPORT_COLUMNS,
    TOKEN_COLUMNS,
    Batch,
    BatchSummary,
    PayloadRef,
    PayloadTable,
    PlannedBatch,
    SampleOrigins,
)
from tailrace.transport.columns import (
    DTYPE_NAMES,
    NAMED,
    is_monotonic,
    spans_are_valid,
    view_column,
    view_named_columns,
)
from tailrace.transport.segments import Segment, TensorBuffers

_TOKENS = {name: DTYPE_NAMES[dtype] for name, dtype in TOKEN_COLUMNS.items()}
_BODY = {**_TOKENS, **dict.fromkeys(SUPPORT_COLUMNS, "I32")}
"""All that is long."""
_PLAN = {
    "temperatures": "F32",
    "sample_offsets": "I32",
    "row_offsets": "I32",
    "mixed_spans": "I32",
    "support_offsets": "I32",
    "advantages": "F32",
    "advantage_offsets": "I32",
}
_PAYLOADS = {"payload_chunks": "I32", "payload_refs": "U8"}
"""The table of payloads: its chunks, row after row, and the references (msgpack)."""
_SHORT = {**_PLAN, **_PAYLOADS, "origins": "U8"}
"""All that is small, and has a checksum of its own."""


def part_tensors(part: PlannedBatch) -> tuple[dict[str, TensorBuffers], dict[str, str]]:
    """The part's columns, ready to be written from where they lie, and its metadata. O(samples)."""
    table = part.payloads()
    short: dict[str, NDArray[np.generic]] = {
        **part.plan_columns(),
        "payload_chunks": table.chunks.reshape(-1),
        "payload_refs": np.frombuffer(msgspec.msgpack.encode(table.payloads), np.uint8),
        "origins": np.frombuffer(msgspec.msgpack.encode(part.origins()), np.uint8),
    }
    tensors = {name: TensorBuffers(dtype, short[name].shape, [short[name].data]) for name, dtype in _SHORT.items()}
    for name, dtype in _BODY.items():
        tensors[name] = TensorBuffers(dtype, (part.size(name),), (piece.data for piece in part.pieces(name)))
    for name, kind in part.columns.items():
        pieces = (piece.reshape(-1).data for piece in part.named_pieces(name))
        tensors[NAMED + name] = TensorBuffers(DTYPE_NAMES[kind.dtype], (part.num_tokens, *kind.width), pieces)
    metadata = {
        "summary": msgspec.json.encode(part.summary).decode(),
        "rank": str(part.first_rank),
        "num_ranks": str(part.num_ranks),
        "plan_xxh3": _checksum(short[name] for name in _SHORT),
    }
    return tensors, metadata


def read_batch(path: Path | str, segment: Segment) -> Batch:
    """The batch that lies in a segment: views of it. `path` is for messages. Raises `CorruptData`."""
    with guarded(f"{path} holds no batch"):
        return _batch(path, segment)


def _batch(path: Path | str, segment: Segment) -> Batch:
    what = f"the batch in {path}"
    columns = {name: view_column(what, segment, name, dtype) for name, dtype in {**_BODY, **_SHORT}.items()}
    if _checksum(columns[name] for name in _SHORT) != segment.metadata.get("plan_xxh3"):
        raise CorruptData(f"the batch in {path} is damaged: plan_xxh3 differs")
    metadata = _read_metadata(path, segment)
    _require_consistent(path, metadata, columns)
    return Batch(
        summary=metadata.summary,
        payloads=_read_payloads(path, columns),
        origins=_read_origins(path, columns),
        columns=view_named_columns(what, segment, len(columns["token_ids"])),
        rank=metadata.rank,
        num_ranks=metadata.num_ranks,
        **columns,  # type: ignore[arg-type]
    )


class _Metadata(msgspec.Struct, frozen=True):
    """A batch's metadata."""

    summary: BatchSummary
    rank: int
    num_ranks: int


def _read_metadata(path: Path | str, segment: Segment) -> _Metadata:
    texts = segment.metadata
    metadata = _Metadata(
        summary=msgspec.json.decode(texts["summary"], type=BatchSummary),
        rank=msgspec.json.decode(texts["rank"], type=int),
        num_ranks=msgspec.json.decode(texts["num_ranks"], type=int),
    )
    if not 0 <= metadata.rank < metadata.num_ranks:
        raise CorruptData(f"the batch in {path} is for rank {metadata.rank} of {metadata.num_ranks}")
    return metadata


def _require_consistent(path: Path | str, metadata: _Metadata, columns: Mapping[str, NDArray[np.generic]]) -> None:
    """The plan fits the columns, so that no row can reach beyond them."""
    num_tokens, num_samples = len(columns["token_ids"]), len(columns["temperatures"])
    rows, samples = columns["row_offsets"], columns["sample_offsets"]
    samples_fit = len(samples) == num_samples + 1 and is_monotonic(samples, num_tokens)
    rows_fit = samples_fit and is_monotonic(rows, num_samples)
    fits = {
        "columns": all(len(columns[name]) == num_tokens for name in _TOKENS),
        "sample_offsets": samples_fit,
        "row_offsets": rows_fit and bool(np.all(np.diff(samples[rows]) <= metadata.summary.row_tokens)),
        "advantage_offsets": samples_fit and _advantages_fit(columns, np.diff(samples)),
        "mixed_spans": spans_are_valid(columns["mixed_spans"], num_tokens),
        "support_offsets": samples_fit and _supports_fit(columns),
        "summary": _is_part(metadata, num_tokens, num_samples, len(rows) - 1),
    }
    wrong = [name for name, is_right in fits.items() if not is_right]
    if wrong:
        raise CorruptData(f"the batch in {path} contradicts itself in: {', '.join(wrong)}")


def _is_part(metadata: _Metadata, *counts: int) -> bool:
    """Whether tokens, samples and rows are those of the whole batch, or of a part of it."""
    whole = (metadata.summary.num_tokens, metadata.summary.num_samples, metadata.summary.num_rows)
    return counts == whole if metadata.num_ranks == 1 else all(map(int.__le__, counts, whole))


def _advantages_fit(columns: Mapping[str, NDArray[np.generic]], lengths: NDArray[np.generic]) -> bool:
    """Whether each sample has one advantage, or one for each of its tokens."""
    offsets = columns["advantage_offsets"]
    if len(offsets) != len(lengths) + 1 or not is_monotonic(offsets, len(columns["advantages"])):
        return False
    counts = np.diff(offsets)
    return bool(np.all((counts == 1) | (counts == lengths)))


def _supports_fit(columns: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether each sample has as many ids as the counts of its tokens say."""
    counts, samples, offsets = columns["support_counts"], columns["sample_offsets"], columns["support_offsets"]
    if len(offsets) != len(samples) or not is_monotonic(offsets, len(columns["support_ids"])):
        return False
    if not len(counts):
        return len(columns["support_ids"]) == 0
    if len(counts) != samples[-1] or counts.min() < 0:
        return False
    before = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return bool(np.array_equal(before[samples], offsets))


def _read_payloads(path: Path | str, columns: dict[str, NDArray[np.generic]]) -> PayloadTable:
    """The table of payloads, out of `columns`. Raises `CorruptData` for one that means what is not there."""
    flat, encoded = columns.pop("payload_chunks"), columns.pop("payload_refs")
    with guarded(f"the batch in {path} has no table of payloads"):
        refs = msgspec.msgpack.decode(encoded.data, type=tuple[PayloadRef, ...])
    if len(flat) % 4:
        raise CorruptData(f"the chunks of payloads in {path} are cut off")
    table = PayloadTable(flat.reshape(-1, 4).astype(np.int32, copy=False), refs)
    if not table.is_sound(columns["sample_offsets"].astype(np.int32, copy=False)):
        raise CorruptData(f"the batch in {path} contradicts itself in: payload_chunks")
    return table


def _read_origins(path: Path | str, columns: dict[str, NDArray[np.generic]]) -> SampleOrigins:
    """Out of `columns`. Raises `CorruptData` for those of other samples."""
    with guarded(f"the batch in {path} does not tell where its samples come from"):
        origins = msgspec.msgpack.decode(columns.pop("origins").data, type=SampleOrigins)
    if not origins.is_sound(len(columns["temperatures"])):
        raise CorruptData(f"the batch in {path} contradicts itself in: origins")
    return origins


def _checksum(arrays: Iterable[NDArray[np.generic]]) -> str:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
