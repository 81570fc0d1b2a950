"""Supports are cut, joined and carried to a rank as a list of lists would be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.generation.completions import head, joined, tail
from tailrace.records import Branch, Completion, FinishReason, Supports, ragged_places
from tests.transport.transport_builders import plan

RAGGED = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=9)


def supports_of(lists: list[list[int]]) -> Supports:
    flat = [token_id for one in lists for token_id in one]
    return Supports(np.array(flat, np.int32), np.array([len(one) for one in lists], np.int32))


def as_lists(supports: Supports) -> list[list[int]]:
    ends = np.cumsum(supports.counts).tolist()
    return [supports.token_ids[end - n : end].tolist() for end, n in zip(ends, supports.counts.tolist(), strict=True)]


def completion(lists: list[list[int]] | None, size: int = 0) -> Completion:
    size = size if lists is None else len(lists)
    columns = np.arange(size, dtype=np.int32), np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Completion(*columns, FinishReason.RUNNING, supports=None if lists is None else supports_of(lists))


@given(lists=RAGGED, data=st.data())
def test_parts_and_places_are_those_of_a_list(lists: list[list[int]], data: st.DataObject) -> None:
    supports = supports_of(lists)
    start = data.draw(st.integers(0, len(lists)))
    end = data.draw(st.integers(start, len(lists)))
    assert as_lists(supports.part(start, end)) == lists[start:end]
    places = data.draw(st.lists(st.integers(0, max(0, len(lists) - 1)), max_size=6)) if lists else []
    assert as_lists(supports.at(np.array(places, np.int64))) == [lists[place] for place in places]


@given(parts=st.lists(RAGGED, min_size=1, max_size=4))
def test_what_is_joined_can_be_cut_again(parts: list[list[list[int]]]) -> None:
    whole = joined(completion(parts[0]), [completion(part) for part in parts[1:]], FinishReason.STOP)
    assert whole.supports is not None
    lists = [one for part in parts for one in part]
    assert as_lists(whole.supports) == lists
    for place in range(len(lists) + 1):
        first, second = head(whole, place).supports, tail(whole, place).supports
        assert first is not None
        assert second is not None
        assert as_lists(first) + as_lists(second) == lists


def test_a_part_without_supports_was_sampled_from_the_whole_vocabulary() -> None:
    whole = joined(completion(None, 2), [completion([[4, 5]]), completion(None, 1)], FinishReason.STOP)
    assert whole.supports is not None
    assert as_lists(whole.supports) == [[], [], [4, 5], []]
    assert joined(completion(None, 2), [completion(None, 1)], FinishReason.STOP).supports is None


@pytest.mark.parametrize(("ids", "counts"), [([1, 2], [1]), ([1], [2, -1]), ([1, 2], [1, 2])])
def test_counts_that_are_not_those_of_the_ids_are_refused(ids: list[int], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="are not the supports"):
        Supports(np.array(ids, np.int32), np.array(counts, np.int32))


def test_supports_of_other_tokens_are_refused() -> None:
    none = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="a completion of 2 tokens came with the supports of 1"):
        Completion(none, none.astype(np.float32), none, FinishReason.STOP, supports=supports_of([[1]]))


@given(turns=st.lists(st.tuples(st.integers(0, 300), RAGGED | st.none()), max_size=5))
def test_a_branch_holds_each_tokens_support_and_none_for_context(
    turns: list[tuple[int, list[list[int]] | None]],
) -> None:
    branch, expected, known = Branch(), list[list[int]](), False
    for context, lists in turns:
        branch.extend_context(np.zeros(context, np.int32))
        branch.extend_completion(completion(lists, 3))
        expected += [[]] * context + ([[]] * 3 if lists is None else lists)
        known |= lists is not None
    assert (branch.support_counts is not None) == known
    assert branch.num_support_ids == sum(map(len, expected))
    if branch.support_counts is not None:
        ids = np.concatenate([np.empty(0, np.int32), *branch.support_ids])
        assert as_lists(Supports(ids, branch.support_counts)) == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_of_a_rank_hold_the_supports_of_their_tokens(num_ranks: int) -> None:
    planned = plan([9, 3, 0, 5, 1, 8], num_ranks=num_ranks, row_tokens=10)
    for rank in range(num_ranks):
        batch, samples = planned.assembled(rank), planned.part(rank).samples
        place = 0
        for index in range(batch.num_rows):
            row = batch.row(index)
            assert row.supports is not None
            own = samples[place : place + len(row.sample_lengths)]
            place += len(own)
            assert row.supports.num_tokens == len(row.token_ids)
            counts = [one.branch.support_counts for one in own]
            sizes = [np.zeros(one.num_tokens, np.int32) if n is None else n for one, n in zip(own, counts, strict=True)]
            assert row.supports.counts.tolist() == np.concatenate(sizes).tolist()
            ids = [ids for one in own for ids in one.branch.support_ids]
            assert row.supports.token_ids.tolist() == np.concatenate([np.empty(0, np.int32), *ids]).tolist()
    assert planned.num_bytes == sum(planned.assembled(rank).num_bytes for rank in range(num_ranks))


def test_whole_vocabularies_cost_nothing() -> None:
    planned = plan([1], row_tokens=10)
    batch = planned.assembled()
    assert (len(batch.support_counts), len(batch.support_ids)) == (0, 0)
    assert batch.row(0).supports is None
    assert planned.num_bytes == batch.num_bytes == 13


def test_places_of_nothing_are_none() -> None:
    assert ragged_places(np.zeros(0, np.int64), np.zeros(0, np.int32)).tolist() == []
