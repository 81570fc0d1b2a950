"""Which rows attend together, and how they come to lie side by side."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cpu.lanes import (
    LANE_ROWS,
    WORTH_EXCHANGING_TOKENS,
    ordering_exchanges,
    plan_lanes,
)

CAPACITY = 512
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=100).map(lambda values: np.array(values, np.int64))


@given(LENGTHS)
def test_lanes_cover_every_row_once_and_are_long_enough_for_each(lengths: np.ndarray) -> None:
    lanes = plan_lanes(lengths, CAPACITY)
    assert [row for lane in lanes for row in range(lane.begin, lane.end)] == list(range(len(lengths)))
    assert all(lengths[lane.begin : lane.end].max() <= lane.longest <= CAPACITY for lane in lanes)


@given(LENGTHS)
def test_after_the_exchanges_no_lane_holds_a_row_that_belongs_to_a_later_one(lengths: np.ndarray) -> None:
    ordered = lengths.copy()
    for first, second in ordering_exchanges(lengths):
        ordered[[first, second]] = ordered[[second, first]]
    assert sorted(ordered) == sorted(lengths)
    for end in range(LANE_ROWS, len(ordered), LANE_ROWS):
        assert ordered[end:].max() - ordered[end - LANE_ROWS : end].min() < WORTH_EXCHANGING_TOKENS
