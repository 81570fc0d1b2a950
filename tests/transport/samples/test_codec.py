"""The wire format of training samples: what goes in comes out, and bytes that nobody should write are refused."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

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
from tailrace.transport.samples.codec import (
    DOCUMENT_TOKENS,
    SCHEMA,
    decode_samples,
    encode_samples,
    take_document,
)
from tailrace.transport.segments import TensorBuffers, pack_segment, read_segment
from tests.transport.transport_builders import handed, make_sample

SENT = [handed(make_sample(np.random.default_rng(0), number, 2 * number + 3, oldest_version=4)) for number in (3, 5)]
"""Of 9 and 13 tokens, with the same columns."""
TOKENS = 22
CONTENT = encode_samples(SENT, run="run", epoch="epoch")
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
    if draw(st.booleans()):
        branch.set_column("reference_kl_weights", random.standard_normal(draw(st.integers(0, branch.num_tokens))))
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


def assert_same_samples(received: Sequence[StreamedSample], handed: Sequence[FeedSample]) -> None:
    for one, other in zip(received, handed, strict=True):
        assert_same_sample(one, other)


def assert_same_sample(received: StreamedSample, handed: FeedSample) -> None:
    """What came out is what went in: a branch's columns, advantages spread, columns filled up with what is unset."""
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
        assert (found[len(column) :] == (name == "reference_kl_weights")).all()


@given(samples=st.lists(feed_samples(), min_size=1, max_size=5))
def test_what_is_written_is_read(samples: list[FeedSample]) -> None:
    left, received = deque(samples), list[StreamedSample]()
    while left:
        received += decode_samples(take_document(left, run="a run", epoch="7"))
    assert {(one.origin.run, one.origin.epoch) for one in received} == {("a run", "7")}
    assert_same_samples(received, samples)
    for one, sent in zip(received, samples, strict=True):
        assert one.num_loss_tokens == sum(sent.sample.loss_versions().values())


@given(number=st.integers(0, 1), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_samples_of_the_same_columns_are_one_document(number: int, lengths: list[int]) -> None:
    random = np.random.default_rng(0)
    number += 2  # one advantage for a sample, or one for each token with columns of their own
    samples = [handed(make_sample(random, number, length)) for length in lengths if length or number == 2]
    if samples:
        left = deque(samples)
        assert_same_samples(decode_samples(take_document(left, run="run", epoch="epoch")), samples)
        assert not left


def test_a_document_takes_what_is_there_until_it_is_long() -> None:
    random, tokens = np.random.default_rng(0), DOCUMENT_TOKENS // 2 + 1
    left = deque(handed(make_sample(random, 2, tokens)) for _ in range(3))
    sizes = []
    while left:
        sizes.append(len(decode_samples(take_document(left, run="run", epoch="epoch"))))
    assert sizes == [2, 1]


def test_a_stale_token_stays_and_bears_no_loss() -> None:
    for received in decode_samples(CONTENT):
        sampled = received.policy_versions >= 0
        assert 0 < received.num_loss_tokens < sampled.sum()
        np.testing.assert_array_equal(received.loss_mask, received.policy_versions >= 4)


def test_any_reader_of_safetensors_opens_it() -> None:
    columns = safetensors.numpy.load(CONTENT)
    assert columns["lengths"].tolist() == [9, 13]
    np.testing.assert_array_equal(columns["token_ids"][:9], SENT[0].sample.branch.token_ids)
    np.testing.assert_array_equal(columns["loss_mask"][9:], SENT[1].sample.loss_mask)
    assert columns["column/top_ids"].shape == (TOKENS, 3)


def test_arrays_of_a_sample_are_views_that_nobody_writes() -> None:
    for received in decode_samples(CONTENT):
        for column in (received.token_ids, received.logprobs, received.policy_versions, received.loss_mask):
            assert not column.flags.owndata
            assert not column.flags.writeable
        assert not received.advantages.flags.writeable


def read(content: bytes) -> list[StreamedSample] | CorruptData:
    try:
        return decode_samples(content)
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
    if isinstance(result, list):
        assert_same_samples(result, SENT)


@given(position=st.integers(0, len(CONTENT) - 1), junk=st.binary(min_size=1, max_size=400))
def test_a_smeared_stretch_is_corrupt_data_or_the_same_sample(position: int, junk: bytes) -> None:
    smeared = CONTENT[:position] + junk + CONTENT[position + len(junk) :]
    if isinstance(result := read(smeared), list):
        assert_same_samples(result, SENT)


ORIGINS = msgspec.to_builtins([one.origin for one in decode_samples(CONTENT)])


def forge(columns: dict[str, NDArray[np.generic] | None] | None = None, **metadata: str) -> bytes:
    """A sample whose checksums are right and whose content is not; None: a column that is missing."""
    segment = read_segment("a sample", memoryview(CONTENT))
    tensors = {
        name: TensorBuffers(entry.dtype, entry.shape, [memoryview(CONTENT)[slice(*entry.data_offsets)]])
        for name, entry in segment.tensors.items()
    }
    for name, column in (columns or {}).items():
        tensors.pop(name, None)
        if column is not None:
            tensors[name] = TensorBuffers(DTYPE_NAMES[column.dtype], column.shape, [column.reshape(-1).data])
    return pack_segment(tensors, {**segment.metadata, **metadata})


def test_a_forged_sample_that_is_right_is_read() -> None:
    assert_same_samples(decode_samples(forge()), SENT)


@pytest.mark.parametrize(("schema", "age"), [(SCHEMA - 1, "an older"), (SCHEMA + 1, "a newer"), (999999, "a newer")])
def test_a_sample_of_another_schema_is_told_apart_before_its_columns_are_read(schema: int, age: str) -> None:
    with pytest.raises(OtherSchema, match=rf"a/0 is of schema {schema}, .* reads schema {SCHEMA}: {age} Tailrace"):
        decode_samples(forge({"token_ids": None}, schema=str(schema)), name="a/0")


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "tailrace-batch"},
        {"schema": ""},
        {"schema": "-1"},
        {"schema": "1.0"},
        {"schema": "²"},
        {"origins": ""},
        {"origins": "{}"},
        {"origins": "[]"},
        {"origins": "[" * 5000},
        {"origins": json.dumps(ORIGINS[:1])},
        {"origins": json.dumps([ORIGINS[0], {**ORIGINS[1], "branch_index": "a"}])},
    ],
    ids=lambda metadata: str(metadata)[:40],
)
def test_metadata_of_something_else_is_corrupt_data(metadata: dict[str, str]) -> None:
    assert isinstance(read(forge(**metadata)), CorruptData)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("lengths", None),
        ("lengths", np.array([22], np.int32)),
        ("lengths", np.array([9, 12], np.int32)),
        ("lengths", np.array([23, -1], np.int32)),
        ("lengths", np.array([9, 13, 0], np.int32)),
        ("token_ids", None),
        ("token_ids", np.zeros(21, np.int32)),
        ("token_ids", np.zeros(22, np.float32)),
        ("token_ids", np.zeros((22, 1), np.int32)),
        ("loss_mask", np.zeros(23, np.bool_)),
        ("token_advantages", np.zeros(2, np.float32)),
        ("token_advantages", np.zeros(0, np.float32)),
        ("token_advantages", None),
        ("span_counts", None),
        ("span_counts", np.array([1, 1, 1], np.int32)),
        ("span_counts", np.array([5, -1], np.int32)),
        ("mixed_spans", np.array([3, 4, 2, 3, 0, 1, 1, 2], np.int32)),
        ("mixed_spans", np.array([3], np.int32)),
        ("mixed_spans", np.array([0, 1, 3, 10, 0, 1, 1, 2], np.int32)),
        ("support_counts", np.zeros(22, np.int32)),
        ("support_counts", np.zeros(3, np.int32)),
        ("support_counts", np.full(22, -1, np.int32)),
        ("support_ids", None),
        ("column/teacher", np.zeros(3, np.float32)),
        ("column/top_ids", np.zeros((22, 0), np.int32)),
        ("column/top_ids", np.zeros((22, 2, 2), np.int32)),
    ],
)
def test_columns_that_are_not_of_one_sample_are_corrupt_data(column: str, values: NDArray[np.generic] | None) -> None:
    result = read(forge({column: values}))
    assert isinstance(result, CorruptData)
    named = (column.rsplit("/", maxsplit=1)[-1], "columns", "lengths", "support", "mixed_spans", "advantages")
    assert any(name in str(result) for name in named)


@given(
    column=st.sampled_from(["lengths", "span_counts", "mixed_spans", "support_counts", "support_ids"]),
    numbers=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12), max_size=20),
)
def test_other_numbers_are_refused_or_stay_within_the_sample(column: str, numbers: list[int]) -> None:
    result = read(forge({column: np.array(numbers, np.int32)}))
    if isinstance(result, list):
        for one in result:
            assert all(0 <= start <= end <= one.num_tokens for start, end in one.mixed_spans.tolist())
            assert one.supports is None or one.supports.num_tokens == one.num_tokens


def test_a_column_without_its_checksum_is_corrupt_data() -> None:
    header = xxhash.xxh3_64_intdigest(CONTENT[: 8 + int.from_bytes(CONTENT[:8], "little")])
    without = CONTENT[:-TRAILER_BYTES] + b"".join(part.to_bytes(8, "little") for part in (1, header, 0, 0))
    assert "checksum" in str(read(without))
