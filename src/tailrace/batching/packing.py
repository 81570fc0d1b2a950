"""Samples into rows: which sample lies in which row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.records import Int32Array


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
    """First-fit decreasing: longest sample first, each into the first row with room for it.

    Raises `ValueError` for a sample longer than a row.

    >>> plan = plan_rows([5, 3, 4, 2], row_tokens=7)
    >>> plan.order.tolist(), plan.row_offsets.tolist()
    ([0, 3, 2, 1], [0, 2, 4])
    """
    lengths = np.asarray(lengths, np.int32)
    if len(lengths) and int(lengths.max()) > row_tokens:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit a row of {row_tokens}")
    room: list[int] = []
    rows: list[list[int]] = []
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(sample)
        room[row] -= length
    sizes = [len(row) for row in rows]
    return RowPlan(
        order=np.asarray([sample for row in rows for sample in row], np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
    )
