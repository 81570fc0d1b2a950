"""Rows onto ranks: as many for each, and as equal in cost as can be had in a few milliseconds."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

ROUNDS_AT_ONCE = 32
"""Rows per rank that are dealt, and exchanges that are tried, in one slice: less than a millisecond."""
EXCHANGES_PER_RANK = 4
GOOD_ENOUGH = 1e-3
"""Share of the mean by which ranks may differ without another exchange."""


def deal_rows(costs: NDArray[np.float64], num_ranks: int) -> Generator[None, None, NDArray[np.int64]]:
    """[num_rows]: numbers of rows, those of rank 0 first, each rank's costliest first; yields now and then.

    Rows are dealt in rounds, costliest first, in each round the costliest to the rank with least to do: then no two
    ranks differ by more than one row's cost. Rows of the busiest and the idlest rank are exchanged after that, while it
    helps. `len(costs)` is a multiple of `num_ranks`.
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    if num_ranks == 1:
        return rounds.reshape(-1)
    rows = np.empty((num_ranks, len(rounds)), np.int64)
    loads = np.zeros(num_ranks)
    for number, dealt in enumerate(rounds):
        idlest_first = np.argsort(loads, kind="stable")
        rows[idlest_first, number] = dealt
        loads[idlest_first] += costs[dealt]
        if number % ROUNDS_AT_ONCE == 0:
            yield
    yield from _exchange(rows, loads, costs)
    costliest_first = np.argsort(-costs[rows], axis=1, kind="stable")
    return np.take_along_axis(rows, costliest_first, axis=1).reshape(-1)


def _exchange(rows: NDArray[np.int64], loads: NDArray[np.float64], costs: NDArray[np.float64]) -> Generator[None]:
    """Exchange one row of the busiest rank for one of the idlest, those that bring both nearest to their mean."""
    for count in range(EXCHANGES_PER_RANK * len(loads)):
        busiest, idlest = int(loads.argmax()), int(loads.argmin())
        apart = loads[busiest] - loads[idlest]
        if apart <= GOOD_ENOUGH * loads.mean():
            return
        gains = costs[rows[busiest]][:, None] - costs[rows[idlest]][None, :]
        best = int(np.abs(gains - apart / 2).argmin())
        one, other = divmod(best, rows.shape[1])
        gain = gains[one, other]
        if not 0 < gain < apart:
            return
        rows[busiest, one], rows[idlest, other] = rows[idlest, other], rows[busiest, one]
        loads[busiest] -= gain
        loads[idlest] += gain
        if count % ROUNDS_AT_ONCE == 0:
            yield
