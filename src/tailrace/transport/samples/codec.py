"""One training sample as bytes, and back: the wire format of streams, in the safetensors layout (docs/streams.md).

    metadata   format, schema, origin (JSON: run, epoch, ids, sampling, reward)
    columns    token_ids, logprobs, policy_versions, advantages, loss_mask; more where there are any
    trailer    checksums of the header and of all columns

Writing gathers the columns from the branch they lie in. Reading copies nothing and trusts nothing: a sample of another
schema is told apart before any of its columns is looked at, and then all of it is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import CorruptData, OtherSchema
from tailrace.guards import guarded
from tailrace.records import (
    TOKEN_COLUMNS,
    FeedSample,
    Int32Array,
    StreamedOrigin,
    StreamedSample,
    Supports,
    TrainingSample,
)
from tailrace.transport.columns import DTYPE_NAMES, NAMED, spans_are_valid, view_column, view_named_columns
from tailrace.transport.segments import Segment, TensorBuffers, pack_segment, read_segment, verify_body

FORMAT = "tailrace-sample"
SCHEMA = 1
"""Counts up with every change that a reader of the one before would misread or refuse."""

_TOKENS = {name: DTYPE_NAMES[dtype] for name, dtype in TOKEN_COLUMNS.items()}
_ORIGIN = msgspec.json.Decoder(StreamedOrigin)


def encode_sample(handed: FeedSample, *, run: str, epoch: str) -> bytes:
    """The sample with the loss mask that it has now. O(tokens), each copied once."""
    sample = handed.sample
    origin = StreamedOrigin(
        run=run,
        epoch=epoch,
        sample_id=handed.sample_id,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        task_id=handed.task_id,
        environment=sample.environment,
        branch_index=sample.branch_index,
        temperature=sample.temperature,
        sampling=handed.sampling,
        reward=handed.reward,
        trainer_version=handed.trainer_version,
        oldest_version=sample.oldest_version,
        group_rollouts=handed.group_rollouts,
    )
    tensors = {
        name: TensorBuffers(DTYPE_NAMES[column.dtype], column.shape, [column.reshape(-1).data])
        for name, column in _columns_of(sample)
    }
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "origin": msgspec.json.encode(origin).decode()}
    return pack_segment(tensors, metadata)


def decode_sample(content: bytes, *, name: str = "a sample") -> StreamedSample:
    """The sample that bytes hold: views of them. `name` is for messages.

    Raises `OtherSchema` for one that another version of Tailrace wrote, and `CorruptData` for anything that was cut
    short, changed on its way, or contradicts itself.
    """
    segment = read_segment(name, memoryview(content))
    _require_schema(name, segment)
    verify_body(name, segment, required=True)
    with guarded(f"{name} holds no sample"):
        return _sample(name, segment)


def _columns_of(sample: TrainingSample) -> Iterator[tuple[str, NDArray[Any]]]:
    """In the order of their elements' widths, so that nothing between them is padded."""
    branch = sample.branch
    yield from (("token_ids", branch.token_ids), ("logprobs", branch.logprobs))
    yield from (("policy_versions", branch.policy_versions), ("advantages", _advantages_of(sample)))
    if branch.mixed_spans:
        yield "mixed_spans", np.array(branch.mixed_spans, np.int32).reshape(-1)
    if branch.support_counts is not None:
        yield "support_counts", branch.support_counts
        yield "support_ids", np.concatenate(branch.support_ids)
    for name, column in branch.columns.items():
        missing = ((0, branch.num_tokens - len(column)), *((0, 0) for _ in column.shape[1:]))
        yield NAMED + name, np.pad(column, missing)
    yield "loss_mask", sample.loss_mask


def _advantages_of(sample: TrainingSample) -> NDArray[np.float32]:
    return np.atleast_1d(np.asarray(sample.advantages, np.float32))


def _require_schema(name: str, segment: Segment) -> None:
    found = segment.metadata.get("format")
    if found != FORMAT:
        raise CorruptData(f"{name} is of the format {found!r}, not {FORMAT!r}")
    schema = segment.metadata.get("schema", "")
    if schema == str(SCHEMA):
        return
    if not (schema.isascii() and schema.isdecimal()):
        raise CorruptData(f"{name} has no number of a schema: {schema[:20]!r}")
    age = "an older" if len(schema) == 1 and int(schema) < SCHEMA else "a newer"
    raise OtherSchema(
        f"{name} is of schema {schema[:20]}, and this Tailrace reads schema {SCHEMA}: {age} Tailrace wrote it; install "
        "the same version on both sides"
    )


def _sample(name: str, segment: Segment) -> StreamedSample:
    columns = {column: view_column(name, segment, column, dtype) for column, dtype in _TOKENS.items()}
    num_tokens = len(columns["token_ids"])
    advantages = view_column(name, segment, "advantages", "F32")
    spans = _optional(name, segment, "mixed_spans")
    fits = {
        "columns": all(len(column) == num_tokens for column in columns.values()),
        "advantages": len(advantages) in (1, num_tokens),
        "mixed_spans": spans_are_valid(spans, num_tokens),
    }
    wrong = [column for column, is_right in fits.items() if not is_right]
    if wrong:
        raise CorruptData(f"{name} contradicts itself in: {', '.join(wrong)}")
    return StreamedSample(
        origin=_ORIGIN.decode(segment.metadata["origin"]),
        advantages=_spread(advantages, num_tokens),
        mixed_spans=spans.reshape(-1, 2),
        supports=_supports(name, segment, num_tokens),
        columns=view_named_columns(name, segment, num_tokens),
        **columns,  # type: ignore[arg-type]
    )


def _spread(advantages: NDArray[Any], num_tokens: int) -> NDArray[np.float32]:
    """[num_tokens], of one number for all of them or one for each."""
    return advantages if len(advantages) == num_tokens else np.repeat(advantages, num_tokens)


def _supports(name: str, segment: Segment, num_tokens: int) -> Supports | None:
    if "support_counts" not in segment.tensors:
        return None
    counts = _optional(name, segment, "support_counts")
    if len(counts) != num_tokens:
        raise CorruptData(f"{name} contradicts itself in: support_counts")
    return Supports(_optional(name, segment, "support_ids"), counts)


def _optional(name: str, segment: Segment, column: str) -> Int32Array:
    if column not in segment.tensors:
        return np.empty(0, np.int32)
    return view_column(name, segment, column, "I32")  # type: ignore[return-value]
