"""Where the big arrays of a branch and of a batch lie, by a plain model of it: one entry per position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CorruptData, PayloadLost
from tailrace.records import Branch, Completion, ExpertArray, FinishReason, PayloadChunk, PayloadRef
from tailrace.records.payload import PayloadChunks
from tailrace.records.payload_table import UNRECORDED, PayloadTable, PayloadTableBuilder

STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(0, 3)), max_size=12)


def reference(index: int, num_tokens: int = 100, dtype: str = "uint8") -> PayloadRef:
    return PayloadRef(f"memory:{index}", dtype, (num_tokens, 2, 2))


def completion(num_tokens: int, *chunks: PayloadChunk) -> Completion:
    column = np.zeros(num_tokens, np.int32)
    return Completion(column, column.astype(np.float32), column, FinishReason.STOP, routed_experts=chunks)


def recorded(stretches: list[tuple[int, int, int]]) -> tuple[PayloadChunks, dict[int, tuple[int, int]]]:
    """What was added, and by position the first payload that had it and its entry there."""
    chunks, first = PayloadChunks(), {}
    for index, (start, length, offset) in enumerate(stretches):
        chunks.add(PayloadChunk(start, start + length, reference(index), offset))
        for position in range(start, start + length):
            first.setdefault(position, (index, offset + position - start))
    return chunks, first


@given(STRETCHES, st.integers(0, 60))
def test_every_position_is_covered_once_by_what_was_recorded_first(
    stretches: list[tuple[int, int, int]], num_tokens: int
) -> None:
    chunks, first = recorded(stretches)
    position = 0
    for chunk in chunks.covering(num_tokens):
        assert chunk.start == position < chunk.end
        position = chunk.end
        for at in range(chunk.start, chunk.end):
            found = chunk.ref and (int(chunk.ref.uri.partition(":")[2]), chunk.offset + at - chunk.start)
            assert found == first.get(at)
    assert position == num_tokens


def test_a_turn_adds_one_chunk_whatever_came_before() -> None:
    branch = Branch()
    for turn in range(50):
        branch.extend_context([1, 2, 3])
        start = max(0, branch.num_tokens - 4)  # the last turn's boundary token is forwarded now
        branch.extend_completion(completion(5, PayloadChunk(start, branch.num_tokens + 4, reference(turn))))
    *chunks, boundary = branch.payload_chunks
    assert [chunk.end - chunk.start for chunk in chunks] == [7] + [8] * 49
    assert (boundary.start, boundary.end, boundary.ref) == (399, 400, None)


def test_a_boundary_token_that_nobody_forwarded_again_is_a_chunk_of_its_own() -> None:
    branch = Branch()
    branch.extend_context([1, 2])
    branch.extend_completion(completion(3, PayloadChunk(0, 4, reference(0))))
    branch.extend_context([7])
    branch.extend_completion(completion(2, PayloadChunk(5, 7, reference(1))))
    assert [(chunk.start, chunk.end, chunk.ref is None) for chunk in branch.payload_chunks] == [
        (0, 4, False),
        (4, 5, True),
        (5, 7, False),
        (7, 8, True),
    ]


def test_a_branch_without_payloads_has_no_chunks() -> None:
    branch = Branch()
    branch.extend_context([1, 2])
    branch.extend_completion(completion(3))
    assert branch.payload_chunks == ()


@pytest.mark.parametrize("chunk", [PayloadChunk(3, 2, reference(0)), PayloadChunk(-1, 2), PayloadChunk(0, 1, None, -1)])
def test_an_impossible_chunk_is_refused(chunk: PayloadChunk) -> None:
    with pytest.raises(ValueError, match="chunk"):
        PayloadChunks().add(chunk)


def arrays(count: int, dtype: type[np.unsignedinteger]) -> dict[str, ExpertArray]:
    random = np.random.default_rng(count)
    return {f"memory:{index}": random.integers(0, 200, (100, 2, 2)).astype(dtype) for index in range(count)}


@given(st.lists(st.tuples(STRETCHES, st.integers(1, 60)), min_size=1, max_size=5), st.booleans())
def test_a_table_reads_what_its_branches_recorded(
    samples: list[tuple[list[tuple[int, int, int]], int]], wide: bool
) -> None:
    dtype = np.uint16 if wide else np.uint8
    stored = arrays(12, dtype)
    builder, expected = PayloadTableBuilder(), []
    for stretches, num_tokens in samples:
        chunks, first = PayloadChunks(), {}
        for index, (start, length, offset) in enumerate(stretches):
            chunks.add(PayloadChunk(start, start + length, reference(index, dtype=dtype.__name__), offset))
            for position in range(start, min(start + length, num_tokens)):
                first.setdefault(position, stored[f"memory:{index}"][offset + position - start])
        builder.add(num_tokens, tuple(chunks.covering(num_tokens)) if chunks else ())
        nothing = np.full((2, 2), np.iinfo(dtype).max, dtype)
        expected.append(np.stack([first.get(position, nothing) for position in range(num_tokens)]))
    table, offsets = builder.table(), np.cumsum([0, *(length for _, length in samples)]).astype(np.int32)
    assert table.is_sound(offsets)
    if not table:
        return
    np.testing.assert_array_equal(table.read(lambda ref: stored[ref.uri]), np.concatenate(expected))
    for start, end, own in zip(offsets[:-1].tolist(), offsets[1:].tolist(), expected, strict=True):
        part = table.between(start, end)
        np.testing.assert_array_equal(part.read(lambda ref: stored[ref.uri]), own)


def two_samples() -> PayloadTable:
    builder = PayloadTableBuilder()
    builder.add(4, (PayloadChunk(0, 3, reference(0), 5), PayloadChunk(3, 4)))
    builder.add(2, (PayloadChunk(0, 2, reference(1)),))
    return builder.table()


def test_reading_into_memory_that_was_lent_copies_there() -> None:
    stored, room = arrays(2, np.uint8), np.empty((9, 2, 2), np.uint8)
    read = two_samples().read(lambda ref: stored[ref.uri], out=room)
    assert read is not None
    assert np.shares_memory(read, room)
    assert len(read) == 6


def test_a_lost_payload_is_raised_or_told_and_then_reads_as_unrecorded() -> None:
    stored = arrays(1, np.uint8)

    def open_payload(ref: PayloadRef) -> ExpertArray:
        if ref.uri not in stored:
            raise PayloadLost(f"{ref.uri} is gone")
        return stored[ref.uri]

    with pytest.raises(PayloadLost, match="memory:1"):
        two_samples().read(open_payload)
    told: list[PayloadLost] = []
    read = two_samples().read(open_payload, on_lost=told.append)
    assert read is not None
    assert len(told) == 1
    assert (read[4:] == 255).all()
    np.testing.assert_array_equal(read[:3], stored["memory:0"][5:8])


def test_payloads_of_different_kinds_do_not_fit_one_row() -> None:
    stored = {"memory:0": np.zeros((100, 2, 2), np.uint8), "memory:1": np.zeros((100, 2, 3), np.uint8)}
    with pytest.raises(CorruptData, match="memory:1"):
        two_samples().read(lambda ref: stored[ref.uri])


@given(st.data())
def test_an_unsound_table_is_recognized(data: st.DataObject) -> None:
    table, offsets = two_samples(), np.asarray([0, 4, 6], np.int32)
    assert table.is_sound(offsets)
    chunks = table.chunks.copy()
    place = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 3)))
    unrecorded_offset = place == (1, 3)
    chunks[place] += data.draw(st.integers(-200, 200).filter(bool))
    if (chunks[:, 2] >= UNRECORDED).all() and (chunks[:, 2] < 2).all() and place[1] == 2:
        return  # another payload, or none: nothing that the table could know better
    start, end = chunks[place[0], :2]
    fits = chunks[place] + (end - start) <= table.payloads[0].shape[0]
    expected_sound = place[1] == 3 and chunks[place] >= 0 and (unrecorded_offset or fits)
    assert PayloadTable(chunks, table.payloads).is_sound(offsets) is bool(expected_sound)
