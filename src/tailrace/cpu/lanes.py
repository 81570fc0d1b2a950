"""Which running rows attend together. Pure decisions over plain numbers: no torch, no clock.

Attention over the cache reads every row up to the longest one of its call, and on a CPU reading is all it costs. Ages
of running requests are spread evenly, so one call over all of them reads twice what is there. Hence lanes: neighbouring
rows that attend in one call, each call as long as its own longest row, the rows kept in order of length. A request that
joins is short and belongs at the end; the exchanges that bring it there move one long row per lane, once in a lifetime.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LANE_ROWS = 16
"""Rows of one lane."""

CALL_TOKENS = 256
"""Tokens of cache that are read in the time that one more call costs."""

WORTH_EXCHANGING_TOKENS = 32
"""Rows that differ less stay where they are."""

ROUND_TOKENS = 16
"""Lanes' lengths are multiples of it: kernels that are made per shape see fewer shapes."""


class Lane(NamedTuple):
    """Rows `[begin, end)`, of which the longest has `longest` tokens (rounded up)."""

    begin: int
    end: int
    longest: int


def plan_lanes(lengths: NDArray[np.int64], capacity: int) -> list[Lane]:
    """Lanes over rows with contexts of `lengths`; neighbours join where padding costs less than another call.

    >>> plan_lanes(np.array([300] * 16 + [40] * 16), capacity=512)
    [Lane(begin=0, end=16, longest=304), Lane(begin=16, end=32, longest=48)]
    >>> plan_lanes(np.array([70] * 16 + [66] * 16), capacity=512)
    [Lane(begin=0, end=32, longest=80)]
    """
    lanes: list[Lane] = []
    for begin in range(0, len(lengths), LANE_ROWS):
        end = min(begin + LANE_ROWS, len(lengths))
        longest = min(capacity, -int(lengths[begin:end].max()) // ROUND_TOKENS * -ROUND_TOKENS)
        if lanes:
            joined = Lane(lanes[-1].begin, end, max(lanes[-1].longest, longest))
            if _read(joined) <= _read(lanes[-1]) + (end - begin) * longest + CALL_TOKENS:
                lanes[-1] = joined
                continue
        lanes.append(Lane(begin, end, longest))
    return lanes


def ordering_exchanges(lengths: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Pairs of rows to exchange, one after the other, until no lane holds a row that belongs to a later one.

    >>> list(ordering_exchanges(np.array([90] * 15 + [1] + [80] + [70] * 15)))
    [(15, 16)]
    """
    lengths = lengths.copy()
    for end in range(LANE_ROWS, len(lengths), LANE_ROWS):
        lane = lengths[end - LANE_ROWS : end]
        while True:
            short, long = end - LANE_ROWS + int(lane.argmin()), end + int(lengths[end:].argmax())
            if lengths[long] - lengths[short] < WORTH_EXCHANGING_TOKENS:
                break
            lengths[short], lengths[long] = lengths[long], lengths[short]
            yield short, long


def _read(lane: Lane) -> int:
    return (lane.end - lane.begin) * lane.longest
