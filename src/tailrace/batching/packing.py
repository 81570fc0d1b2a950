"""Samples into rows, rows onto data-parallel ranks.

    samples ──best fit, longest first──► rows ──split up to a multiple of the ranks──► dealt by cost ──► ranks

The plan is made once, where the batch is formed, and travels with it. Every rank gets the same number of rows, since
ranks that share a model take each micro-batch together, and rows of about the same cost at the same position.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.batching.ranks import deal_rows
from tailrace.records import Int32Array

NumberT = TypeVar("NumberT", np.int64, np.float64)

PLANNED_AT_ONCE = 512
"""Samples; about a millisecond."""
ATTENTION_TOKENS = 16384
"""Length of a sample at which attention costs as much as the rest of its forward pass: about 12 x a model's hidden size
(per layer and token, 24 hidden^2 operations in the projections, 2 length x hidden in causal attention). A hidden size
of 1,365 stands for all: batches are formed without the model, and how much long samples weigh is all that hangs on it.
"""
FEW_ROWS = 2
"""Per rank; among more, a row that is not full hardly weighs."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Shapes of rows, and the number of ranks that they are dealt to."""

    row_tokens: int
    num_ranks: int = 1
    num_shapes: int = 8
    """A row is padded to a multiple of `row_tokens / num_shapes`, so that one that is not full costs less; 1: all rows
    are of one shape."""

    def __post_init__(self) -> None:
        if min(self.row_tokens, self.num_ranks, self.num_shapes) < 1:
            raise ValueError(f"a packing needs numbers above 0: {self}")

    def shapes(self, row_lengths: NDArray[np.int64]) -> Int32Array:
        """[num_rows]: what rows of so many tokens are padded to.

        >>> Packing(row_tokens=8192).shapes(np.array([8192, 5000, 1])).tolist()
        [8192, 5120, 1024]
        """
        step = -(-self.row_tokens // self.num_shapes)
        multiples = np.maximum(1, -(-row_lengths // step)) * step
        shapes: Int32Array = np.minimum(multiples, self.row_tokens).astype(np.int32)
        return shapes


def sample_costs(lengths: Int32Array) -> NDArray[np.float64]:
    """[num_samples], in tokens of a very short sample: linear in the length, and quadratic for attention.

    >>> sample_costs(np.array([4096, 16384], np.int32)).tolist()
    [5120.0, 32768.0]
    """
    tokens = lengths.astype(np.float64)
    return tokens + tokens**2 / ATTENTION_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """`order` lists samples row by row, rank by rank; row r holds `order[row_offsets[r] : row_offsets[r + 1]]`."""

    order: Int32Array  # [num_samples]
    row_offsets: Int32Array  # [num_rows + 1], into `order`
    rank_offsets: Int32Array  # [num_ranks + 1], into the rows
    padding: float
    """1 - tokens / tokens of the rows' shapes."""

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return len(self.row_offsets) - 1


def plan_rows(lengths: Sequence[int] | Int32Array, packing: Packing) -> Generator[None, None, RowPlan]:
    """Best-fit decreasing: longest sample first, each into the fullest row with room for it. O(samples log rows).

    Where ranks get few rows each, samples are dealt to as many rows by cost instead, if those hold them all: a rank
    with the row that is left over, or with the longest samples, would keep the others waiting.
    Then rows are split until every rank gets as many as every other (a row is left empty where no row has two samples
    to part), and dealt by cost. Yields now and then. Raises `ValueError` for a sample longer than a row.

    >>> from tailrace.batching.slices import drained
    >>> plan = drained(plan_rows([5, 3, 4, 2], Packing(row_tokens=7)))
    >>> plan.order.tolist(), plan.row_offsets.tolist()
    ([0, 3, 2, 1], [0, 2, 4])
    >>> plan = drained(plan_rows([5, 3, 4, 2], Packing(row_tokens=16, num_ranks=2)))
    >>> plan.order.tolist(), plan.rank_offsets.tolist()
    ([0, 3, 2, 1], [0, 1, 2])
    """
    lengths = np.asarray(lengths, np.int32)
    if len(lengths) and int(lengths.max()) > packing.row_tokens:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit a row of {packing.row_tokens}")
    costs = sample_costs(lengths)
    rows = yield from _fill_evenly(lengths, costs.tolist(), packing)
    _split_rows(rows, -len(rows) % packing.num_ranks, costs.tolist())
    yield
    order, row_offsets = _joined(rows)
    dealt = yield from deal_rows(_sums(costs[order], row_offsets), packing.num_ranks)
    yield
    order, row_offsets = _joined([rows[row] for row in dealt.tolist()])
    row_lengths = _sums(lengths[order].astype(np.int64), row_offsets)
    shapes = packing.shapes(row_lengths)
    return RowPlan(
        order=order,
        row_offsets=row_offsets,
        rank_offsets=np.arange(packing.num_ranks + 1, dtype=np.int32) * np.int32(len(rows) // packing.num_ranks),
        padding=1.0 - int(row_lengths.sum()) / int(shapes.sum(dtype=np.int64)) if len(shapes) else 0.0,
    )


def _fill_evenly(
    lengths: Int32Array, costs: Sequence[float], packing: Packing
) -> Generator[None, None, list[list[int]]]:
    """Rows that are as full as they can be; for ranks with few rows each, of about the same cost."""
    rows = yield from _fill_rows(lengths, packing.row_tokens)
    wanted = len(rows) + -len(rows) % packing.num_ranks
    if packing.num_ranks == 1 or not rows or wanted > FEW_ROWS * packing.num_ranks:
        return rows
    return _fill_by_cost(lengths.tolist(), costs, wanted, packing.row_tokens) or rows


def _fill_by_cost(lengths: Sequence[int], costs: Sequence[float], count: int, row_tokens: int) -> list[list[int]]:
    """`count` rows, longest sample first, each into the row of least cost that has room (longest processing time first:
    Graham 1969); none where some sample finds no room.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [row_tokens] * count
    by_cost = [(0.0, 0, row) for row in range(count)]  # a heap: of as little cost that with the fewest samples
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        full = []
        while by_cost and room[by_cost[0][2]] < lengths[sample]:
            full.append(heapq.heappop(by_cost))
        if not by_cost:
            return []
        cost, held, row = by_cost[0]
        heapq.heapreplace(by_cost, (cost + costs[sample], held + 1, row))
        for one in full:
            heapq.heappush(by_cost, one)
        rows[row].append(sample)
        room[row] -= lengths[sample]
    return rows


def _fill_rows(lengths: Int32Array, row_tokens: int) -> Generator[None, None, list[list[int]]]:
    """Best-fit decreasing; equal lengths in the order they came in."""
    rows: list[list[int]] = []
    free: list[int] = []  # of every row, sorted: its room, and in the lower digits its number
    digits = len(lengths) + 1
    order = np.argsort(-lengths, kind="stable")
    for count, (sample, length) in enumerate(zip(order.tolist(), lengths[order].tolist(), strict=True), 1):
        place = bisect.bisect_left(free, length * digits)
        if place == len(free):
            room, row = row_tokens, len(rows)
            rows.append([])
        else:
            room, row = divmod(free.pop(place), digits)
        rows[row].append(sample)
        bisect.insort(free, (room - length) * digits + row)
        if count % PLANNED_AT_ONCE == 0:
            yield
    return rows


def _split_rows(rows: list[list[int]], count: int, costs: Sequence[float]) -> None:
    """Make `count` rows more: the costliest row that holds two samples or more is halved, as long as there is one."""
    if not count:
        return
    by_cost = [(-sum(costs[sample] for sample in row), number) for number, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(by_cost)
    for _ in range(count):
        half: list[int] = []
        if by_cost:
            _, number = heapq.heappop(by_cost)
            rows[number], half = _halved(rows[number], costs)
            for part, place in ((rows[number], number), (half, len(rows))):
                if len(part) > 1:
                    heapq.heappush(by_cost, (-sum(costs[sample] for sample in part), place))
        rows.append(half)


def _halved(row: Sequence[int], costs: Sequence[float]) -> tuple[list[int], list[int]]:
    """Two parts of about the same cost; the samples come costliest first."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0.0, 0.0]
    for sample in row:
        lesser = int((totals[1], len(halves[1])) < (totals[0], len(halves[0])))
        halves[lesser].append(sample)
        totals[lesser] += costs[sample]
    return halves


def _joined(rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """([num_samples], [num_rows + 1])."""
    order = np.array([sample for row in rows for sample in row], np.int32)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return order, offsets


def _sums(values: NDArray[NumberT], offsets: Int32Array) -> NDArray[NumberT]:
    """[num_rows]: over the samples of each row."""
    totals = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=totals[1:])
    sums: NDArray[NumberT] = totals[offsets[1:]] - totals[offsets[:-1]]
    return sums
