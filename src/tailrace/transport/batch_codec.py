"""A batch as named tensors, and back: every column is one tensor, the summary is metadata.

Reading copies nothing and trusts nothing: types, lengths and the row plan are checked before a batch exists, the plan
against its checksum always, the token columns where the writer added one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.errors import CorruptData
from tailrace.records import Batch, BatchSummary, PayloadRef, PayloadTable
from tailrace.transport.segments import Segment, TensorBuffers

_DTYPES = {"I32": np.dtype(np.int32), "F32": np.dtype(np.float32), "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_BODY = {
    "token_ids": "I32",
    "logprobs": "F32",
    "policy_versions": "I32",
    "loss_mask": "BOOL",
    "mixed_cache": "BOOL",
    "advantages": "F32",
}
"""The columns of [num_tokens]."""
_PLAN = {"temperatures": "F32", "sample_offsets": "I32", "row_offsets": "I32", "environment_ids": "I32"}
_PAYLOADS = {"payload_chunks": "I32", "payload_refs": "U8"}
"""The table of payloads: its chunks, row after row, and the references (msgpack)."""
_STATE = {"scheduler_state": "U8"}

_COLUMNS = {**_BODY, **_PLAN, **_PAYLOADS, **_STATE}


def batch_tensors(batch: Batch) -> dict[str, TensorBuffers]:
    """The batch's columns, ready to be written from where they lie."""
    arrays: dict[str, NDArray[np.generic]] = {name: getattr(batch, name) for name in (*_BODY, *_PLAN)}
    arrays["scheduler_state"] = np.frombuffer(batch.scheduler_state, np.uint8)
    arrays |= _payload_columns(batch)
    return {name: _buffers(array) for name, array in arrays.items()}


def batch_metadata(batch: Batch, *, checksum_body: bool) -> dict[str, str]:
    """All that is no column; with `checksum_body` a checksum of the token columns too."""
    metadata = {
        "summary": msgspec.json.encode(batch.summary).decode(),
        "environments": msgspec.json.encode(batch.environments).decode(),
        "plan_xxh3": _checksum([*(getattr(batch, name) for name in _PLAN), *_payload_columns(batch).values()]),
    }
    if checksum_body:
        metadata["body_xxh3"] = _checksum(getattr(batch, name) for name in _BODY)
    return metadata


def read_batch(path: Path, segment: Segment) -> Batch:
    """The batch that lies in a mapped segment: views of it. Raises `CorruptData`."""
    columns = {name: _view(path, segment, name, dtype) for name, dtype in _COLUMNS.items()}
    for part, names in (("plan_xxh3", (*_PLAN, *_PAYLOADS)), ("body_xxh3", _BODY)):
        expected = segment.metadata.get(part)
        if expected is None and part == "body_xxh3":
            continue
        if _checksum(columns[name] for name in names) != expected:
            raise CorruptData(f"the batch in {path} is damaged: {part} differs")
    summary, environments = _read_metadata(path, segment)
    _require_consistent(path, summary, environments, columns)
    state = columns.pop("scheduler_state").tobytes()
    payloads = _read_payloads(path, columns)
    return Batch(
        summary=summary,
        environments=environments,
        scheduler_state=state,
        payloads=payloads,
        **columns,  # type: ignore[arg-type]
    )


def _payload_columns(batch: Batch) -> dict[str, NDArray[np.generic]]:
    table = batch.payloads
    refs = np.frombuffer(msgspec.msgpack.encode(table.payloads), np.uint8)
    return {"payload_chunks": table.chunks.reshape(-1), "payload_refs": refs}


def _buffers(array: NDArray[np.generic]) -> TensorBuffers:
    contiguous = np.ascontiguousarray(array)
    return TensorBuffers(_NAMES[array.dtype], array.shape, [contiguous.view(np.uint8).reshape(-1).data])


def _view(path: Path, segment: Segment, name: str, dtype: str) -> NDArray[np.generic]:
    entry = segment.tensors.get(name)
    if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
        raise CorruptData(f"the batch in {path} needs a column {name!r} of {dtype}; found {entry}")
    start = entry.data_offsets[0]
    if start % _DTYPES[dtype].itemsize:
        raise CorruptData(f"column {name!r} of {path} is not aligned")
    if entry.shape[0] == 0:
        return np.empty(0, _DTYPES[dtype])
    return np.frombuffer(segment.mapping, _DTYPES[dtype], entry.shape[0], start)


def _read_metadata(path: Path, segment: Segment) -> tuple[BatchSummary, tuple[str, ...]]:
    try:
        summary = msgspec.json.decode(segment.metadata["summary"], type=BatchSummary)
        environments = msgspec.json.decode(segment.metadata["environments"], type=tuple[str, ...])
    except (KeyError, msgspec.DecodeError, UnicodeEncodeError) as error:
        raise CorruptData(f"{path} holds no batch: {error}") from error
    return summary, environments


def _require_consistent(
    path: Path, summary: BatchSummary, environments: tuple[str, ...], columns: dict[str, NDArray[np.generic]]
) -> None:
    """The plan fits the columns, so that no row can reach beyond them."""
    num_tokens, num_samples = len(columns["token_ids"]), len(columns["temperatures"])
    ids = columns["environment_ids"]
    rows, samples = columns["row_offsets"], columns["sample_offsets"]
    fits = {
        "columns": all(len(columns[name]) == num_tokens for name in _BODY),
        "environment_ids": len(ids) == num_samples and _in_range(ids, len(environments)),
        "sample_offsets": len(samples) == num_samples + 1 and _climbs(samples, num_tokens),
        "row_offsets": _climbs(rows, num_samples),
        "summary": (summary.num_tokens, summary.num_samples, summary.num_rows)
        == (num_tokens, num_samples, len(rows) - 1),
    }
    wrong = [name for name, is_right in fits.items() if not is_right]
    if wrong:
        raise CorruptData(f"the batch in {path} contradicts itself in: {', '.join(wrong)}")


def _read_payloads(path: Path, columns: dict[str, NDArray[np.generic]]) -> PayloadTable:
    """The table of payloads, out of `columns`. Raises `CorruptData` for one that means what is not there."""
    flat, encoded = columns.pop("payload_chunks"), columns.pop("payload_refs")
    try:
        refs = msgspec.msgpack.decode(encoded.data, type=tuple[PayloadRef, ...])
    except msgspec.DecodeError as error:
        raise CorruptData(f"the batch in {path} has no table of payloads: {error}") from error
    if len(flat) % 4:
        raise CorruptData(f"the chunks of payloads in {path} are cut off")
    table = PayloadTable(flat.reshape(-1, 4).astype(np.int32, copy=False), refs)
    if not table.is_sound(columns["sample_offsets"].astype(np.int32, copy=False)):
        raise CorruptData(f"the batch in {path} contradicts itself in: payload_chunks")
    return table


def _climbs(offsets: NDArray[np.generic], end: int) -> bool:
    """Whether offsets go from 0 to `end` and never back."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end:
        return False
    return bool(np.all(offsets[1:] >= offsets[:-1]))  # type: ignore[operator]


def _in_range(ids: NDArray[np.generic], count: int) -> bool:
    return bool(np.all((ids >= 0) & (ids < count)))  # type: ignore[operator]


def _checksum(arrays: Iterable[NDArray[np.generic]]) -> str:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
