"""The wire format of training samples: what goes in comes out, and bytes that nobody should write are refused."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.errors import CorruptData, OtherSchema
from tailrace.records import (
    Branch,
    Completion,
    FeedSample,
    FinishReason,
    GroupId,
    RolloutId,
    SamplingParams,
    StreamedSample,
    Supports,
    TaskId,
    TrainingSample,
    sample_of,
)
from tailrace.transport.columns import DTYPE_NAMES
from tailrace.transport.samples.codec import SCHEMA, decode_sample, encode_sample
from tailrace.transport.segments import TensorBuffers, pack_segment, read_segment
from tests.transport.transport_builders import handed, make_sample

SENT = handed(make_sample(np.random.default_rng(0), 3, 9, oldest_version=4))
CONTENT = encode_sample(SENT, run="run", epoch="epoch")
TRAILER_BYTES = 32

SEEDS = st.integers(0, 2**32 - 1)
TURNS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=4)
"""Tokens of context, tokens of a completion, whether it was sampled from a part of the vocabulary."""


@st.composite
def feed_samples(draw: st.DrawFn) -> FeedSample:
    """Any number of turns, with or without what few samples have."""
    random, branch = np.random.default_rng(draw(SEEDS)), Branch()
    for context, sampled, restricted in draw(TURNS):
        branch.extend_context(random.integers(0, 1000, context, dtype=np.int32))
        counts = random.integers(0, 4, sampled).astype(np.int32)
        branch.extend_completion(
            Completion(
                token_ids=random.integers(0, 2**31, sampled).astype(np.int32),
                logprobs=random.standard_normal(sampled, dtype=np.float32),
                policy_versions=random.integers(0, 9, sampled).astype(np.int32),
                finish_reason=FinishReason.STOP,
                mixed_spans=((0, 1),) if sampled > 1 else (),
                supports=Supports(np.arange(counts.sum(), dtype=np.int32), counts) if restricted else None,
            )
        )
    for name, width in draw(st.dictionaries(st.sampled_from(["one", "other"]), st.integers(0, 3), max_size=2)).items():
        count = draw(st.integers(0, branch.num_tokens))
        values = random.standard_normal((count, width) if width else count, dtype=np.float32)
        branch.set_column(name, values if draw(st.booleans()) else np.round(values).astype(np.int32))
    per_token = draw(st.booleans())
    sample = TrainingSample(
        rollout_id=RolloutId(draw(st.text(max_size=9))),
        group_id=GroupId(draw(st.text(max_size=9))),
        temperature=draw(st.floats(0.1, 2)),
        branch=branch,
        advantages=random.standard_normal(branch.num_tokens, dtype=np.float32) if per_token else draw(st.floats(-9, 9)),
        oldest_version=draw(st.integers(0, 10)),
        branch_index=draw(st.integers(0, 99)),
        environment=draw(st.text(max_size=9)),
    )
    return FeedSample(
        sample_id=sample_of(sample.rollout_id, sample.branch_index),
        sample=sample,
        task_id=TaskId(draw(st.text(max_size=9))),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        sampling=SamplingParams(max_tokens=draw(st.integers(1, 99)), stop_token_ids=(1, 2)),
        trainer_version=draw(st.integers(0, 10)),
        group_rollouts=draw(st.integers(1, 99)),
    )


def assert_same_sample(received: StreamedSample, handed: FeedSample) -> None:
    """What came out is what went in: a branch's columns, advantages spread, columns filled up with zeros."""
    sent, told = handed.sample, received.origin
    branch = sent.branch
    for name in ("sample_id", "task_id", "reward", "sampling", "trainer_version", "group_rollouts"):
        assert getattr(told, name) == getattr(handed, name)
    for name in ("rollout_id", "group_id", "environment", "branch_index", "temperature", "oldest_version"):
        assert getattr(told, name) == getattr(sent, name)
    advantages = np.broadcast_to(np.asarray(sent.advantages, np.float32), branch.num_tokens)
    expected = {
        "token_ids": branch.token_ids,
        "logprobs": branch.logprobs,
        "policy_versions": branch.policy_versions,
        "loss_mask": sent.loss_mask,
        "advantages": advantages,
        "mixed_spans": np.array(branch.mixed_spans, np.int32).reshape(-1, 2),
    }
    for name, column in expected.items():
        found = getattr(received, name)
        assert found.dtype == column.dtype, name
        np.testing.assert_array_equal(found, column, err_msg=name)
    assert (received.supports is None) == (branch.support_counts is None)
    if received.supports is not None:
        np.testing.assert_array_equal(received.supports.counts, branch.support_counts)
        np.testing.assert_array_equal(received.supports.token_ids, np.concatenate(branch.support_ids))
    assert received.columns.keys() == branch.columns.keys()
    for name, column in branch.columns.items():
        found = received.columns[name]
        assert (found.dtype, found.shape) == (column.dtype, (branch.num_tokens, *column.shape[1:]))
        np.testing.assert_array_equal(found[: len(column)], column)
        assert not found[len(column) :].any()


@given(sample=feed_samples())
def test_what_is_written_is_read(sample: FeedSample) -> None:
    received = decode_sample(encode_sample(sample, run="a run", epoch="7"))
    assert (received.origin.run, received.origin.epoch) == ("a run", "7")
    assert_same_sample(received, sample)
    assert received.num_loss_tokens == sum(sample.sample.loss_versions().values())


def test_a_stale_token_stays_and_bears_no_loss() -> None:
    received = decode_sample(CONTENT)
    sampled = received.policy_versions >= 0
    assert 0 < received.num_loss_tokens < sampled.sum()
    np.testing.assert_array_equal(received.loss_mask, received.policy_versions >= 4)


def test_any_reader_of_safetensors_opens_it() -> None:
    columns = safetensors.numpy.load(CONTENT)
    np.testing.assert_array_equal(columns["token_ids"], SENT.sample.branch.token_ids)
    np.testing.assert_array_equal(columns["loss_mask"], SENT.sample.loss_mask)
    assert columns["column/top_ids"].shape == (9, 3)


def test_arrays_of_a_sample_are_views_that_nobody_writes() -> None:
    received = decode_sample(CONTENT)
    for column in (received.token_ids, received.logprobs, received.policy_versions, received.loss_mask):
        assert not column.flags.owndata
        assert not column.flags.writeable


def read(content: bytes) -> StreamedSample | CorruptData:
    try:
        return decode_sample(content)
    except CorruptData as error:
        return error


@pytest.mark.parametrize("length", range(0, len(CONTENT), 7))
def test_a_sample_that_is_cut_short_is_corrupt_data(length: int) -> None:
    assert isinstance(read(CONTENT[:length]), CorruptData)


@given(position=st.integers(0, len(CONTENT) - 1), flip=st.integers(1, 255))
def test_a_flipped_byte_is_corrupt_data_or_the_trailer_s_number(position: int, flip: int) -> None:
    content = bytearray(CONTENT)
    content[position] ^= flip
    result = read(bytes(content))
    numbers = range(len(CONTENT) - TRAILER_BYTES, len(CONTENT) - TRAILER_BYTES + 8)
    assert isinstance(result, CorruptData) or position in numbers
    if isinstance(result, StreamedSample):
        assert_same_sample(result, SENT)


@given(position=st.integers(0, len(CONTENT) - 1), junk=st.binary(min_size=1, max_size=400))
def test_a_smeared_stretch_is_corrupt_data_or_the_same_sample(position: int, junk: bytes) -> None:
    smeared = CONTENT[:position] + junk + CONTENT[position + len(junk) :]
    if isinstance(result := read(smeared), StreamedSample):
        assert_same_sample(result, SENT)


def forge(columns: dict[str, NDArray[np.generic] | None] | None = None, **metadata: str) -> bytes:
    """A sample whose checksums are right and whose content is not; None: a column that is missing."""
    segment = read_segment("a sample", memoryview(CONTENT))
    tensors = {
        name: TensorBuffers(entry.dtype, entry.shape, [memoryview(CONTENT)[slice(*entry.data_offsets)]])
        for name, entry in segment.tensors.items()
    }
    for name, column in (columns or {}).items():
        del tensors[name]
        if column is not None:
            tensors[name] = TensorBuffers(DTYPE_NAMES[column.dtype], column.shape, [column.reshape(-1).data])
    return pack_segment(tensors, {**segment.metadata, **metadata})


def test_a_forged_sample_that_is_right_is_read() -> None:
    assert_same_sample(decode_sample(forge()), SENT)


@pytest.mark.parametrize(("schema", "age"), [(SCHEMA - 1, "an older"), (SCHEMA + 1, "a newer"), (999999, "a newer")])
def test_a_sample_of_another_schema_is_told_apart_before_its_columns_are_read(schema: int, age: str) -> None:
    with pytest.raises(OtherSchema, match=rf"the sample a/0 is of schema {schema}, .* reads schema 1: {age} Tailrace"):
        decode_sample(forge({"token_ids": None}, schema=str(schema)), name="the sample a/0")


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "tailrace-batch"},
        {"schema": ""},
        {"schema": "-1"},
        {"schema": "1.0"},
        {"schema": "²"},
        {"origin": ""},
        {"origin": "{}"},
        {"origin": "[" * 5000},
        {"origin": json.dumps({**msgspec.to_builtins(decode_sample(CONTENT).origin), "branch_index": "a"})},
    ],
    ids=lambda metadata: str(metadata)[:40],
)
def test_metadata_of_something_else_is_corrupt_data(metadata: dict[str, str]) -> None:
    assert isinstance(read(forge(**metadata)), CorruptData)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("token_ids", None),
        ("token_ids", np.zeros(8, np.int32)),
        ("token_ids", np.zeros(9, np.float32)),
        ("token_ids", np.zeros((9, 1), np.int32)),
        ("loss_mask", np.zeros(10, np.bool_)),
        ("advantages", np.zeros(2, np.float32)),
        ("advantages", np.zeros(0, np.float32)),
        ("mixed_spans", np.array([3, 4, 2, 3], np.int32)),
        ("mixed_spans", np.array([3], np.int32)),
        ("mixed_spans", np.array([3, 10], np.int32)),
        ("support_counts", np.zeros(9, np.int32)),
        ("support_counts", np.zeros(3, np.int32)),
        ("support_counts", np.full(9, -1, np.int32)),
        ("support_ids", None),
        ("column/teacher", np.zeros(3, np.float32)),
        ("column/top_ids", np.zeros((9, 0), np.int32)),
        ("column/top_ids", np.zeros((9, 2, 2), np.int32)),
    ],
)
def test_columns_that_are_not_of_one_sample_are_corrupt_data(column: str, values: NDArray[np.generic] | None) -> None:
    result = read(forge({column: values}))
    assert isinstance(result, CorruptData)
    assert column.rsplit("/", maxsplit=1)[-1] in str(result) or "columns" in str(result) or "support" in str(result)


@given(
    column=st.sampled_from(["mixed_spans", "support_counts", "support_ids"]),
    numbers=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12), max_size=20),
)
def test_other_numbers_are_refused_or_stay_within_the_sample(column: str, numbers: list[int]) -> None:
    result = read(forge({column: np.array(numbers, np.int32)}))
    if isinstance(result, StreamedSample):
        assert all(0 <= start <= end <= result.num_tokens for start, end in result.mixed_spans.tolist())
        assert result.supports is None or result.supports.num_tokens == result.num_tokens


def test_a_column_without_its_checksum_is_corrupt_data() -> None:
    header = xxhash.xxh3_64_intdigest(CONTENT[: 8 + int.from_bytes(CONTENT[:8], "little")])
    without = CONTENT[:-TRAILER_BYTES] + b"".join(part.to_bytes(8, "little") for part in (1, header, 0, 0))
    assert "checksum" in str(read(without))
