"""Training samples as bytes, and back: the wire format of streams, in the safetensors layout (docs/streams.md).

    metadata   format, schema, origins (JSON: run, epoch, ids, sampling, reward; of each sample)
    columns    lengths, token_ids, logprobs, policy_versions, advantages, loss_mask; more where there are any
    trailer    checksums of the header and of all columns

A document holds one sample or more, their columns end to end. Writing gathers them from the branches that they lie in.
Reading copies nothing and trusts nothing: a document of another schema is told apart before any of its columns is
looked at, and then all of it is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import CorruptData, OtherSchema
from tailrace.guards import guarded
from tailrace.records import (
    TOKEN_COLUMNS,
    ColumnKind,
    FeedSample,
    Float32Array,
    Int32Array,
    StreamedOrigin,
    StreamedSample,
    Supports,
    TrainingSample,
)
from tailrace.transport.columns import (
    DTYPE_NAMES,
    NAMED,
    spans_are_valid,
    view_column,
    view_named_columns,
)
from tailrace.transport.segments import Segment, TensorBuffers, pack_segment, read_segment, verify_body

FORMAT = "tailrace-sample"
SCHEMA = 2
"""Counts up with every change that a reader of the one before would misread or refuse."""

DOCUMENT_TOKENS = 1 << 15
"""A document takes another sample while it has fewer: its reader takes it apart while the next one is written."""

_TOKENS = {name: DTYPE_NAMES[dtype] for name, dtype in TOKEN_COLUMNS.items()}
_ORIGINS = msgspec.json.Decoder(list[StreamedOrigin])
_NO_SPANS = np.empty((0, 2), np.int32)


def take_document(handed: deque[FeedSample], *, run: str, epoch: str) -> bytes:
    """A document of the first of these, which are removed: as many as fit, and have the same columns; at least one.

    Their loss masks are those that they have now. O(tokens), each copied once.
    """
    first = handed.popleft()
    taken, num_tokens, kind = [first], first.num_tokens, _kind(first.sample)
    while handed and num_tokens < DOCUMENT_TOKENS and _kind(handed[0].sample) == kind:
        taken.append(handed.popleft())
        num_tokens += taken[-1].num_tokens
    return encode_samples(taken, run=run, epoch=epoch)


def encode_samples(handed: Sequence[FeedSample], *, run: str, epoch: str) -> bytes:
    """One document of samples that have the same columns."""
    origins = msgspec.json.encode([_origin(one, run, epoch) for one in handed])
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "origins": origins.decode()}
    return pack_segment(dict(_tensors_of([one.sample for one in handed])), metadata)


def decode_samples(content: bytes, *, name: str = "a document") -> list[StreamedSample]:
    """The samples that bytes hold, in order: views of them. `name` is for messages.

    Raises `OtherSchema` for what another version of Tailrace wrote, and `CorruptData` for anything that was cut
    short, changed on its way, or contradicts itself.
    """
    segment = read_segment(name, memoryview(content))
    _require_schema(name, segment)
    verify_body(name, segment)
    with guarded(f"{name} holds no samples"):
        return _samples(name, segment)


# --- writing ---------------------------------------------------------------------------------------------------------


def _origin(handed: FeedSample, run: str, epoch: str) -> StreamedOrigin:
    sample = handed.sample
    return StreamedOrigin(
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


def _kind(sample: TrainingSample) -> tuple[object, ...]:
    """Equal for samples that can lie in one document."""
    branch = sample.branch
    named = branch.columns and sorted(
        (name, column.dtype.str, column.shape[1:]) for name, column in branch.columns.items()
    )
    return isinstance(sample.advantages, np.ndarray), branch.support_counts is None, named


def _tensors_of(samples: Sequence[TrainingSample]) -> Iterator[tuple[str, TensorBuffers]]:
    """In the order of their elements' widths, so that nothing between them is padded."""
    branches = [sample.branch for sample in samples]
    yield "lengths", _whole(np.array([branch.num_tokens for branch in branches], np.int32))
    yield "token_ids", _joined([branch.token_ids for branch in branches])
    yield "logprobs", _joined([branch.logprobs for branch in branches])
    yield "policy_versions", _joined([branch.policy_versions for branch in branches])
    if isinstance(samples[0].advantages, np.ndarray):
        yield "token_advantages", _joined([np.asarray(sample.advantages, np.float32) for sample in samples])
    else:
        yield "advantages", _whole(np.array([sample.advantages for sample in samples], np.float32))
    if any(branch.mixed_spans for branch in branches):
        yield "span_counts", _whole(np.array([len(branch.mixed_spans) for branch in branches], np.int32))
        edges = [edge for branch in branches for span in branch.mixed_spans for edge in span]
        yield "mixed_spans", _whole(np.array(edges, np.int32))
    if branches[0].support_counts is not None:
        counts = [branch.support_counts for branch in branches if branch.support_counts is not None]  # all of them
        yield "support_counts", _joined(counts)
        yield "support_ids", _joined([ids for branch in branches for ids in branch.support_ids])
    for name in branches[0].columns:
        yield NAMED + name, _joined([_filled_up(name, branch.columns[name], branch.num_tokens) for branch in branches])
    yield "loss_mask", _joined([sample.loss_mask for sample in samples])


def _whole(column: NDArray[Any]) -> TensorBuffers:
    return _joined([column])


def _joined(columns: Sequence[NDArray[Any]]) -> TensorBuffers:
    """End to end; all of one type and width."""
    shape = (sum(map(len, columns)), *columns[0].shape[1:])
    return TensorBuffers(DTYPE_NAMES[columns[0].dtype], shape, [column.reshape(-1).data for column in columns])


def _filled_up(name: str, column: NDArray[Any], num_tokens: int) -> NDArray[Any]:
    """To so many tokens, with what stands for those that nothing was set for."""
    return np.concatenate([column, ColumnKind.of(column).unset(name, num_tokens - len(column))])


# --- reading ---------------------------------------------------------------------------------------------------------


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


def _samples(name: str, segment: Segment) -> list[StreamedSample]:
    origins = _ORIGINS.decode(segment.metadata["origins"])
    lengths = view_column(name, segment, "lengths", "I32")
    columns = {column: view_column(name, segment, column, dtype) for column, dtype in _TOKENS.items()}
    num_tokens = len(columns["token_ids"])
    fits = {
        "lengths": len(lengths) == len(origins) > 0 and _counts_add_up(lengths, num_tokens),
        "columns": all(len(column) == num_tokens for column in columns.values()),
    }
    _require(name, fits)
    advantages = _advantages(name, segment, lengths)
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    bounds = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    spans = _mixed_spans(name, segment, lengths)
    supports = _supports(name, segment, bounds)
    named = view_named_columns(name, segment, num_tokens)
    return [
        StreamedSample(
            origin=origin,
            advantages=advantages[where],
            mixed_spans=of_spans,
            supports=support,
            columns={column: values[where] for column, values in named.items()},
            **{column: values[where] for column, values in columns.items()},  # type: ignore[arg-type]
        )
        for origin, where, of_spans, support in zip(origins, bounds, spans, supports, strict=True)
    ]


def _require(name: str, fits: dict[str, bool]) -> None:
    if wrong := [column for column, is_right in fits.items() if not is_right]:
        raise CorruptData(f"{name} contradicts itself in: {', '.join(wrong)}")


def _counts_add_up(counts: NDArray[Any], total: int) -> bool:
    return bool(counts.min(initial=0) >= 0) and int(counts.sum(dtype=np.int64)) == total


def _advantages(name: str, segment: Segment, lengths: NDArray[Any]) -> Float32Array:
    """[num_tokens], of one number for all tokens of a sample, or one for each."""
    if "token_advantages" in segment.tensors:
        advantages = view_column(name, segment, "token_advantages", "F32")
        _require(name, {"token_advantages": len(advantages) == int(lengths.sum(dtype=np.int64))})
        return advantages  # type: ignore[return-value]
    advantages = view_column(name, segment, "advantages", "F32")
    _require(name, {"advantages": len(advantages) == len(lengths)})
    spread = np.repeat(advantages, lengths)
    spread.flags.writeable = False
    return spread


def _mixed_spans(name: str, segment: Segment, lengths: NDArray[Any]) -> list[Int32Array]:
    """Of each sample, [spans, 2], counted from its first token."""
    if "mixed_spans" not in segment.tensors:
        return [_NO_SPANS] * len(lengths)
    counts: NDArray[Any] = view_column(name, segment, "span_counts", "I32")
    spans: NDArray[Any] = view_column(name, segment, "mixed_spans", "I32")
    _require(
        name, {"mixed_spans": len(counts) == len(lengths) and _counts_add_up(2 * counts.astype(np.int64), len(spans))}
    )
    parts = np.split(spans, 2 * np.cumsum(counts[:-1]))
    _require(name, {"mixed_spans": all(map(spans_are_valid, parts, lengths.tolist()))})
    return [part.reshape(-1, 2) for part in parts]


def _supports(name: str, segment: Segment, bounds: Sequence[slice]) -> list[Supports | None]:
    if "support_counts" not in segment.tensors:
        return [None] * len(bounds)
    token_ids: NDArray[Any] = view_column(name, segment, "support_ids", "I32")
    whole = Supports(token_ids, view_column(name, segment, "support_counts", "I32"))  # type: ignore[arg-type]
    _require(name, {"support_counts": whole.num_tokens == bounds[-1].stop})
    parts: list[Supports | None] = []
    used = 0
    for where in bounds:
        counts = whole.counts[where]
        end = used + int(counts.sum(dtype=np.int64))
        parts.append(Supports(whole.token_ids[used:end], counts))
        used = end
    return parts
