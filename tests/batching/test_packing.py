"""What every plan of rows promises, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batching.packing import ATTENTION_TOKENS, Packing, RowPlan, plan_rows, sample_costs
from tailrace.batching.slices import drained
from tailrace.records import Int32Array

LENGTHS = st.lists(st.integers(0, 2 * ATTENTION_TOKENS), max_size=80)
PACKINGS = st.builds(
    Packing,
    row_tokens=st.integers(2 * ATTENTION_TOKENS, 6 * ATTENTION_TOKENS),
    num_ranks=st.integers(1, 9),
    num_shapes=st.integers(1, 16),
)


def planned(lengths: list[int] | Int32Array, packing: Packing) -> RowPlan:
    return drained(plan_rows(lengths, packing))


def rows_of(plan: RowPlan) -> list[list[int]]:
    return [
        plan.order[first:last].tolist() for first, last in zip(plan.row_offsets[:-1], plan.row_offsets[1:], strict=True)
    ]


def shapes_of(plan: RowPlan, lengths: list[int], packing: Packing) -> list[int]:
    filled = [sum(lengths[sample] for sample in row) for row in rows_of(plan)]
    shapes: list[int] = packing.shapes(np.array(filled, np.int64)).tolist()
    return shapes


def rank_costs(plan: RowPlan, lengths: list[int]) -> list[float]:
    costs = row_costs(plan, lengths)
    return [sum(costs[first:last]) for first, last in zip(plan.rank_offsets[:-1], plan.rank_offsets[1:], strict=True)]


def row_costs(plan: RowPlan, lengths: list[int]) -> list[float]:
    costs = sample_costs(np.array(lengths, np.int32))
    return [float(sum(costs[sample] for sample in row)) for row in rows_of(plan)]


@given(LENGTHS, PACKINGS)
def test_every_sample_lies_in_exactly_one_row_and_no_row_overflows(lengths: list[int], packing: Packing) -> None:
    plan = planned(lengths, packing)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    for row, shape in zip(rows_of(plan), shapes_of(plan, lengths, packing), strict=True):
        assert sum(lengths[sample] for sample in row) <= shape <= packing.row_tokens


@given(LENGTHS, PACKINGS)
def test_every_rank_has_as_many_rows_as_every_other(lengths: list[int], packing: Packing) -> None:
    plan = planned(lengths, packing)
    assert len(plan.rank_offsets) == packing.num_ranks + 1
    assert (plan.rank_offsets[0], plan.rank_offsets[-1]) == (0, plan.num_rows)
    assert len(set(np.diff(plan.rank_offsets).tolist())) == 1


@given(LENGTHS, PACKINGS)
def test_no_two_ranks_differ_by_more_than_the_costliest_row(lengths: list[int], packing: Packing) -> None:
    plan = planned(lengths, packing)
    costs, per_rank = row_costs(plan, lengths), rank_costs(plan, lengths)
    assert max(per_rank) - min(per_rank) <= max(costs, default=0) + 1e-6


@given(LENGTHS, PACKINGS)
def test_ranks_meet_rows_of_falling_cost_at_the_same_place(lengths: list[int], packing: Packing) -> None:
    plan = planned(lengths, packing)
    costs = np.array(row_costs(plan, lengths)).reshape(packing.num_ranks, -1)
    assert np.all(np.diff(costs, axis=1) <= 1e-9)


@given(LENGTHS, PACKINGS)
def test_a_row_is_left_empty_only_where_no_row_has_two_samples(lengths: list[int], packing: Packing) -> None:
    rows = rows_of(planned(lengths, packing))
    assert all(rows) or max(map(len, rows)) <= 1


@given(LENGTHS, PACKINGS)
def test_the_same_lengths_are_planned_the_same_way(lengths: list[int], packing: Packing) -> None:
    one, other = planned(lengths, packing), planned(np.array(lengths, np.int32), packing)
    assert rows_of(one) == rows_of(other)
    assert one.padding == other.padding


@given(st.lists(st.integers(1, 100), min_size=2, max_size=60), st.integers(100, 300))
def test_at_most_one_row_is_half_empty(lengths: list[int], row_tokens: int) -> None:
    plan = planned(lengths, Packing(row_tokens))
    fill = [sum(lengths[sample] for sample in row) for row in rows_of(plan)]
    assert sum(2 * tokens <= row_tokens for tokens in fill) <= 1


@given(LENGTHS, PACKINGS)
def test_shapes_of_several_lengths_pad_no_more_than_one_length(lengths: list[int], packing: Packing) -> None:
    one_shape = Packing(packing.row_tokens, packing.num_ranks, 1)
    plan, plain = planned(lengths, packing), planned(lengths, one_shape)
    assert plan.padding <= plain.padding + 1e-9
    shapes = shapes_of(plan, lengths, packing)
    assert len(set(shapes)) <= packing.num_shapes
    tokens = sum(shapes)
    assert plan.padding == pytest.approx(1 - sum(lengths) / tokens if tokens else 0)


def first_fit_decreasing(lengths: list[int], row_tokens: int) -> int:
    """Rows that it needs."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for row, free in enumerate(room):
            if free >= length:
                room[row] -= length
                break
        else:
            room.append(row_tokens - length)
    return len(room)


@pytest.mark.parametrize("seed", range(5))
def test_as_few_rows_as_first_fit_decreasing_on_lengths_that_occur(seed: int) -> None:
    random = np.random.default_rng(seed)
    for lengths in (
        random.integers(200, 8001, 64),
        np.clip(random.lognormal(np.log(1500), 0.9, 64), 200, 8000).astype(int),
    ):
        assert planned(lengths.tolist(), Packing(8192)).num_rows <= first_fit_decreasing(lengths.tolist(), 8192)


def test_long_samples_weigh_more_than_their_tokens() -> None:
    """All rows are full; those of longer samples cost more, so the costliest goes with the cheapest."""
    part = ATTENTION_TOKENS // 4
    lengths = [4 * part, 2 * part, 2 * part, *[part] * 8]
    plan = planned(lengths, Packing(ATTENTION_TOKENS, num_ranks=2))
    assert [cost / part for cost in row_costs(plan, lengths)] == [8, 5, 5.5, 5.5]
    assert [cost / part for cost in rank_costs(plan, lengths)] == [13, 11]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_with_a_row_or_two_each_cost_the_same(seed: int, num_ranks: int) -> None:
    lengths = np.random.default_rng(seed).geometric(1 / 200, 64).clip(16, 256).tolist()
    for packing in (Packing(16384 // num_ranks, num_ranks), Packing(8192 // num_ranks, num_ranks)):
        plan = planned(lengths, packing)
        costs = rank_costs(plan, lengths)
        assert plan.num_rows <= 2 * num_ranks
        assert max(costs) < 1.01 * np.mean(costs)


def test_samples_that_fill_rows_to_the_brim_are_packed_by_length() -> None:
    """By cost alone the last one would find no room."""
    lengths, packing = [8, 8, 6, 5, 5], Packing(16, num_ranks=2)
    plan = planned(lengths, packing)
    assert [sum(lengths[sample] for sample in row) for row in rows_of(plan)] == [16, 16]


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a row of 8"):
        planned([9], Packing(8))


@pytest.mark.parametrize("field", ["row_tokens", "num_ranks", "num_shapes"])
def test_a_packing_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Packing(**{"row_tokens": 8, field: 0})
