"""Samples into rows: which sample lies in which row."""

from __future__ import annotations

import bisect
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.batching.slices import drained
from tailrace.records import Int32Array

PLANNED_AT_ONCE = 512
"""Samples; about a millisecond."""


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """`order` lists samples row by row; row r holds `order[row_offsets[r] : row_offsets[r + 1]]`."""

    order: Int32Array  # [num_samples]
    row_offsets: Int32Array  # [num_rows + 1]

    @property
    def num_rows(self) -> int:
        """Rows used."""
        return len(self.row_offsets) - 1


def plan_rows(lengths: Sequence[int] | Int32Array, row_tokens: int) -> RowPlan:
    """Best-fit decreasing: longest sample first, each into the fullest row with room for it. O(samples log rows).

    Raises `ValueError` for a sample longer than a row.

    >>> plan = plan_rows([5, 3, 4, 2], row_tokens=7)
    >>> plan.order.tolist(), plan.row_offsets.tolist()
    ([0, 3, 2, 1], [0, 2, 4])
    """
    return drained(plan_rows_in_slices(lengths, row_tokens))


def plan_rows_in_slices(lengths: Sequence[int] | Int32Array, row_tokens: int) -> Generator[None, None, RowPlan]:
    """See `plan_rows`; yields now and then."""
    lengths = np.asarray(lengths, np.int32)
    if len(lengths) and int(lengths.max()) > row_tokens:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit a row of {row_tokens}")
    free: list[tuple[int, int]] = []  # (room, row) of every row, sorted
    rows: list[list[int]] = []
    for count, sample in enumerate(np.argsort(-lengths, kind="stable").tolist(), 1):
        length = int(lengths[sample])
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            room, row = row_tokens, len(rows)
            rows.append([])
        else:
            room, row = free.pop(place)
        rows[row].append(sample)
        bisect.insort(free, (room - length, row))
        if count % PLANNED_AT_ONCE == 0:
            yield
    return RowPlan(
        order=np.asarray([sample for row in rows for sample in row], np.int32),
        row_offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32),
    )
