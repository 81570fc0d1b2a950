"""The bookkeeping of the slots, and every decision about them. Pure: plain values and NumPy, no torch, no clock.

A slot is one row of the cache and one row of every column here. Its `tokens[:total]` are known, of which the first
`cached` have keys and values. A row prefills until only its last known token is missing from the cache; then it
decodes: that token goes through the model, and what is sampled becomes the next known one. Decoding rows are kept at
the front, `[0, n)`, so that the cache of all of them is one slice; what ends leaves its tokens and cache behind as the
cached session of its row, until another request needs the row.

    FREE → PREFILL → DECODE → IDLE → (taken over, by its own session first) → PREFILL ...
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailrace.generation.decisions import KvCache
from tailrace.records import GenerationRequest, Int32Array, common_prefix

WORTH_COPYING_TOKENS = 8
"""A shared prefix shorter than this is computed again rather than copied from another row."""


class RowState(enum.IntEnum):
    """What a row is for."""

    FREE = 0
    IDLE = 1
    PREFILL = 2
    DECODE = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and how much of its context is there already."""

    row: int
    kept_tokens: int
    """Tokens of the row's own cache that the context starts with."""
    donor: int | None = None
    """Row to copy the first `copied_tokens` from: another request of the group has the same prompt.

    It is `row` itself where no other one is vacant; the tokens then stay where they are.
    """
    copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which cached keys and values a request may start from."""

    version: int
    """That of the present weights."""
    kv_cache: KvCache = "keep"
    share_across_versions: bool = False

    def allows(self, cache_version: int, *, own_session: bool) -> bool:
        """Whether those of a row whose oldest are of `cache_version`.

        Under `keep` a session goes on over its own older prefix, and over another's if sharing was asked for.

        >>> Reuse(version=2).allows(1, own_session=True), Reuse(version=2).allows(1, own_session=False)
        (True, False)
        """
        may_be_older = self.kv_cache == "keep" and (own_session or self.share_across_versions)
        return cache_version == self.version or may_be_older


@dataclass(frozen=True, slots=True)
class Move:
    """Bring row `source` to the front at `target`; `exchange` when what lies at `target` must survive."""

    source: int
    target: int
    exchange: bool


Column: TypeAlias = NDArray[np.generic]


class SlotTable:
    """Columns over the rows. The engine reads and writes them by slices; a row moves as a whole."""

    def __init__(self, *, slots: int, capacity: int, chunk_tokens: int):
        self.slots, self.capacity, self.chunk_tokens = slots, capacity, chunk_tokens
        self.state = np.zeros(slots, np.int8)
        self.cached = np.zeros(slots, np.int64)
        self.total = np.zeros(slots, np.int64)
        self.completion_start = np.zeros(slots, np.int64)
        """Place of the completion's first token, that of the prefix where there is one."""
        self.limit = np.zeros(slots, np.int64)
        """`total` at which the completion is long enough."""
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.returns_supports = np.zeros(slots, np.bool_)
        """Whether the request wants to know what each token was sampled from, and that is not all of the vocabulary."""
        self.seed = np.zeros(slots, np.uint64)
        self.stop_ids = np.full((slots, 4), -1, np.int64)
        """As wide as a request needed so far, see `widen_stop_ids`; -1 where a request has fewer."""
        self.cache_version = np.zeros(slots, np.int64)
        """Oldest version that wrote keys and values of the row; less where other weights replaced that version's."""
        self.mixed = np.zeros(slots, np.int64)
        """Unreported tokens sampled over keys and values that older weights had a part in; always the last ones."""
        self.preempted = np.zeros(slots, np.int64)
        """Times that the request lost its cache."""
        self.reused = np.zeros(slots, np.int64)
        """Context tokens that were cached when the request came."""
        self.used_at = np.zeros(slots, np.int64)
        """Step of the last use, for eviction."""
        self.added_s = np.zeros(slots)
        self.started_s = np.zeros(slots)
        self.first_token_s = np.zeros(slots)
        self.tokens = np.zeros((slots, capacity), np.int32)
        self.pending = np.zeros(slots, np.int64)
        """Sampled tokens not yet reported: the last `pending` known ones."""
        self.logprobs = np.zeros((slots, chunk_tokens), np.float32)
        self.versions = np.zeros((slots, chunk_tokens), np.int32)
        self.support_counts = np.zeros((slots, chunk_tokens), np.int32)
        """Of the unreported tokens of rows that want them: sizes of supports, and where in the `SupportLog` each is."""
        self.support_starts = np.zeros((slots, chunk_tokens), np.int64)
        self.requests: list[GenerationRequest | None] = [None] * slots
        """The running request, or the last one of an idle row (its session and group)."""

    def running(self) -> NDArray[np.int64]:
        """Rows with a request."""
        return np.flatnonzero(self.state >= RowState.PREFILL)

    def num_decoding(self) -> int:
        """Rows that decode."""
        return int(np.count_nonzero(self.state == RowState.DECODE))

    def widen_stop_ids(self, count: int) -> None:
        """Make room for requests with up to `count` stop ids."""
        if count > self.stop_ids.shape[1]:
            wider = np.full((self.slots, count), -1, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider

    def move(self, move: Move) -> None:
        """Exchange two rows of every column (the cache is the caller's to move)."""
        pair, reverse = [move.source, move.target], [move.target, move.source]
        for column in self._columns():
            column[pair] = column[reverse]
        self.requests[move.source], self.requests[move.target] = (
            self.requests[move.target],
            self.requests[move.source],
        )

    def release(self, row: int) -> None:
        """End the row's request; its cache stays for the session."""
        self.state[row] = RowState.IDLE
        self.pending[row] = 0

    def outdate(self, version: int) -> None:
        """Other weights of this version come: what those before them cached is older."""
        np.minimum(self.cache_version, version - 1, out=self.cache_version)

    def forget(self, row: int) -> None:
        """Free the row and what it cached."""
        self.state[row] = RowState.FREE
        self.cached[row] = self.total[row] = self.pending[row] = 0
        self.requests[row] = None

    def _columns(self) -> list[Column]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]


def place(table: SlotTable, request: GenerationRequest, context: Int32Array, reuse: Reuse) -> Placement | None:
    """Where `request` goes now; None when it has to wait, for a row or for a prompt that its group is computing.

    Its own session's row first. Otherwise a free row, or the idle row used longest ago; and if a row of the same group
    holds more of the context, the shared part is copied instead of computed; where that row is the only vacant one, it
    is taken over. All only as far as `reuse` allows.
    """
    useful = len(context) - 1  # the last token always goes through the model
    row, kept = _session_row(table, request, context[:useful], reuse)
    donor, shared = _donor(table, request, context[:useful], reuse)
    if donor is not None and shared >= kept + WORTH_COPYING_TOKENS:
        if table.cached[donor] < shared:
            return None  # it is being computed: wait for it rather than computing it twice
    else:
        donor, shared = None, 0
    if row is not None:
        return Placement(row, kept, donor, shared)
    row = _vacant_row(table, spare=donor)
    return None if row is None else Placement(row, 0, donor, shared)


def front_moves(table: SlotTable) -> Iterable[Move]:
    """Moves that bring all decoding rows to the front; each must be carried out before the next is asked for."""
    count = table.num_decoding()
    holes = np.flatnonzero(table.state[:count] != RowState.DECODE)
    outside = count + np.flatnonzero(table.state[count:] == RowState.DECODE)
    for hole, source in zip(holes.tolist(), outside.tolist(), strict=True):
        yield Move(source, hole, exchange=table.state[hole] != RowState.FREE)


def prefill_shares(table: SlotTable, budget: int) -> list[tuple[int, int, int]]:
    """`(row, start, end)` of the contexts to compute in this step, oldest requests first, `budget` tokens at most."""
    rows = np.flatnonzero(table.state == RowState.PREFILL)
    shares = []
    for row in rows[np.argsort(table.added_s[rows], kind="stable")].tolist():
        start, missing = int(table.cached[row]), int(table.total[row] - 1 - table.cached[row])
        length = min(missing, budget)
        if length > 0:
            shares.append((row, start, start + length))
            budget -= length
    return shares


def _session_row(
    table: SlotTable, request: GenerationRequest, context: Int32Array, reuse: Reuse
) -> tuple[int | None, int]:
    """The idle row of the request's session that shares the longest prefix, and that length."""
    best, best_length = None, 0
    for row in np.flatnonzero(table.state == RowState.IDLE).tolist():
        held = table.requests[row]
        own_session = held is not None and held.session_id == request.session_id
        if own_session and reuse.allows(int(table.cache_version[row]), own_session=True):
            length = common_prefix(table.tokens[row, : table.cached[row]], context)
            if length > best_length:
                best, best_length = row, length
    return best, best_length


def _donor(table: SlotTable, request: GenerationRequest, context: Int32Array, reuse: Reuse) -> tuple[int | None, int]:
    """The row of the request's group that holds, or is computing, the most of `context`."""
    best, best_length = None, 0
    for row, held in enumerate(table.requests):
        if held is None or held.group_id != request.group_id:
            continue
        if reuse.allows(int(table.cache_version[row]), own_session=held.session_id == request.session_id):
            known = table.total[row] - 1 if table.state[row] == RowState.PREFILL else table.cached[row]
            length = common_prefix(table.tokens[row, :known], context)
            if length > best_length:
                best, best_length = row, length
    return best, best_length


def _vacant_row(table: SlotTable, spare: int | None) -> int | None:
    """A free row, or the idle one used longest ago, `spare` only where it is the only one."""
    free = np.flatnonzero(table.state == RowState.FREE)
    if len(free):
        return int(free[0])
    idle = np.flatnonzero(table.state == RowState.IDLE).tolist()
    return min(idle, key=lambda row: (row == spare, int(table.used_at[row])), default=None)
