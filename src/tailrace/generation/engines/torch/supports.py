"""The supports of tokens that were sampled and not yet reported: no Python per token, and no room for those of none."""

from __future__ import annotations

import numpy as np

from tailrace.generation.engines.torch.sampler import SampledSupports
from tailrace.generation.engines.torch.slots import SlotTable
from tailrace.records import Supports, ragged_places

_FIRST_IDS = 1 << 12


class SupportLog:
    """Token ids step after step, in one array; the table knows where those of each unreported token begin.

    Once the array is full, what no unreported token needs is dropped, or the array grows.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._ids = np.empty(_FIRST_IDS, np.int32)
        self._begin = self._end = 0
        """Place of the array's first id, and of the next one, of all that were ever noted."""

    def note(self, supports: SampledSupports) -> None:
        """Of the tokens that the rows `[0, num_rows)` sample now, before they are counted as pending."""
        counts, table = supports.counts, self._table
        rows = np.arange(len(counts))
        self._make_room(len(supports.token_ids))
        start = self._end - self._begin
        self._ids[start : start + len(supports.token_ids)] = supports.token_ids
        ends = np.cumsum(counts, dtype=np.int64)
        table.support_counts[rows, table.pending[rows]] = counts
        table.support_starts[rows, table.pending[rows]] = self._end + ends - counts
        self._end += len(supports.token_ids)

    def of(self, row: int) -> Supports | None:
        """Those of a row's pending tokens, where its request asked for them."""
        table, pending = self._table, int(self._table.pending[row])
        if not table.returns_supports[row] or not pending:
            return None
        counts = table.support_counts[row, :pending].copy()
        starts = table.support_starts[row, :pending] - self._begin
        return Supports(self._ids[ragged_places(starts, counts)], counts)

    def _make_room(self, count: int) -> None:
        if self._end - self._begin + count <= len(self._ids):
            return
        table = self._table
        unreported = table.returns_supports & (table.pending > 0)
        oldest = int(table.support_starts[unreported, 0].min(initial=self._end))
        kept = self._ids[oldest - self._begin : self._end - self._begin]
        self._ids = np.empty(max(_FIRST_IDS, 2 * (len(kept) + count)), np.int32)
        self._ids[: len(kept)] = kept
        self._begin = oldest
