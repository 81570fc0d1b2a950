"""One token sequence of a rollout, as the trainer will see it.

A branch grows with its rollout and stores each token once, in columns: memory is linear in tokens. When the rollout
ends, its training sample is a view of these columns; there is nothing left to assemble.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.records.arrays import BoolArray, Float32Array, Int32Array, as_token_ids, readonly
from tailrace.records.columns import CROSS_ENTROPY_WEIGHTS, WEIGHTS_OF_SAMPLED, ColumnKind, as_column
from tailrace.records.completion import Completion
from tailrace.records.payload import PayloadChunk, PayloadChunks
from tailrace.records.supports import Supports

CONTEXT_VERSION = -1
"""Policy version of a token that no policy sampled."""

_INITIAL_CAPACITY = 256
_NO_COLUMNS: Mapping[str, NDArray[np.generic]] = MappingProxyType({})
_NONE_WEIGHTLESS: Mapping[str, Mapping[int, int]] = MappingProxyType({})

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Branch:
    """Append-only columns: context and completions in order.

    >>> branch = Branch()
    >>> branch.extend_context([5, 6, 7])
    >>> branch.num_tokens, branch.loss_mask.any()
    (3, np.False_)
    """

    __slots__ = (
        "_logprobs",
        "_loss_mask",
        "_mixed_spans",
        "_named",
        "_num_completion_tokens",
        "_num_support_ids",
        "_num_tokens",
        "_num_weighted",
        "_payload_chunks",
        "_policy_versions",
        "_spans",
        "_support_counts",
        "_support_ids",
        "_token_ids",
        "_tool_spans",
        "_version_counts",
        "_weightless",
        "temperature",
    )

    def __init__(self, temperature: float | None = None) -> None:
        """`temperature` is that of its completions; None: its rollout's."""
        self.temperature = temperature
        self._num_tokens = 0
        self._num_completion_tokens = 0
        self._version_counts: dict[int, int] = {}
        self._spans: list[tuple[int, int]] = []
        self._mixed_spans: list[tuple[int, int]] = []
        self._tool_spans: list[tuple[int, int]] = []
        self._payload_chunks = PayloadChunks()
        self._support_counts: Int32Array | None = None
        self._support_ids: list[Int32Array] = []
        self._num_support_ids = 0
        self._named: dict[str, NDArray[np.generic]] | None = None
        self._num_weighted = 0
        self._weightless: Mapping[str, Mapping[int, int]] = _NONE_WEIGHTLESS
        self._allocate(_INITIAL_CAPACITY)

    def extend_context(self, token_ids: Int32Array | list[int], *, is_tool_output: bool = False) -> None:
        """Append what no policy sampled (prompt, user turn, tool output). Its loss mask is False."""
        added = as_token_ids(token_ids)
        where = self._grow(len(added))
        self._token_ids[where] = added
        if is_tool_output and len(added):
            self._tool_spans.append((where.start, where.stop))

    def extend_completion(self, completion: Completion) -> None:
        """Append what one turn sampled. Its loss mask is True.

        The turn's prompt is all that the branch held before: a chunk of the completion's payload and a position of the
        branch count alike.
        """
        for chunk in completion.routed_experts:
            self._payload_chunks.add(chunk)
        count = completion.num_tokens
        where = self._grow(count)
        if count:
            self._count_versions(completion.policy_versions)
            self._num_completion_tokens += count
        self._token_ids[where] = completion.token_ids
        self._logprobs[where] = completion.logprobs
        self._policy_versions[where] = completion.policy_versions
        self._loss_mask[where] = True
        if completion.supports is not None:
            self._add_supports(completion.supports, where)
        self._spans.append((where.start, where.stop))
        self._mixed_spans += [(where.start + start, where.start + end) for start, end in completion.mixed_spans]

    def set_column(self, name: str, values: object, *, start: int = 0) -> None:
        """Give tokens `start` and on more for a loss to read, under a name: [count] or [count, k] numbers.

        Tokens that nothing is set for are 0, or 1 in `WEIGHTS_OF_SAMPLED`. Raises `ValueError` for values that are no
        column, that reach beyond the branch, or that are of another width than those set before.
        """
        column, columns = as_column(name, values), self._named or {}
        end, kind = start + len(column), ColumnKind.of(column)
        if not 0 <= start <= end <= self._num_tokens:
            raise ValueError(f"column {name!r} for tokens {start} to {end}: the branch has {self._num_tokens}")
        before = columns.get(name, kind.unset(name, 0))
        if (other := ColumnKind.of(before)).width != kind.width:
            raise ValueError(f"column {name!r} is {other}, and cannot be {kind} too")
        kind = other.joined(kind)
        whole = kind.unset(name, max(end, len(before)))
        whole[: len(before)] = before
        whole[start:end] = column
        if name == CROSS_ENTROPY_WEIGHTS:
            if len(whole) and whole[0]:
                raise ValueError(f"column {name!r} has a weight for the first token, which nothing before it predicts")
            self._num_weighted = int(np.count_nonzero(whole))
        elif name in WEIGHTS_OF_SAMPLED:
            is_weightless = (whole == 0) & self.loss_mask[: len(whole)]
            self._weightless = {**self._weightless, name: _counted(self.policy_versions[: len(whole)][is_weightless])}
        readonly(whole)
        self._named = {**columns, name: whole}

    @property
    def columns(self) -> Mapping[str, NDArray[np.generic]]:
        """What `set_column` set, by name, [num_tokens] or fewer, or [num_tokens, k]; the rest is unset."""
        return self._named or _NO_COLUMNS

    @property
    def num_weighted(self) -> int:
        """Tokens with a weight in the column of cross-entropy."""
        return self._num_weighted

    def weightless(self, name: str) -> Mapping[int, int]:
        """How many of the tokens that each policy version sampled have the weight 0 in one of `WEIGHTS_OF_SAMPLED`."""
        return self._weightless.get(name, {})

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return self._num_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that a policy sampled."""
        return self._num_completion_tokens

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that sampled one of its tokens; None while none was sampled."""
        return min(self._version_counts, default=None)

    @property
    def version_counts(self) -> Mapping[int, int]:
        """How many of its tokens each policy version sampled."""
        return self._version_counts

    @property
    def completion_spans(self) -> tuple[tuple[int, int], ...]:
        """First token and end of each completion, in order."""
        return tuple(self._spans)

    @property
    def tool_spans(self) -> tuple[tuple[int, int], ...]:
        """First token and end of each stretch of context that brought what a tool answered, in order; for people."""
        return tuple(self._tool_spans)

    @property
    def mixed_spans(self) -> tuple[tuple[int, int], ...]:
        """Where the completions' `mixed_spans` lie, in order."""
        return tuple(self._mixed_spans)

    @property
    def payload_chunks(self) -> tuple[PayloadChunk, ...]:
        """Where the routed experts of each position lie: all of the branch in order, or () where none were recorded.

        The first record of a position counts. Positions without a record are chunks without a reference.
        """
        return tuple(self._payload_chunks.covering(self._num_tokens)) if self._payload_chunks else ()

    @property
    def token_ids(self) -> Int32Array:
        """[num_tokens], read-only view."""
        return self._view(self._token_ids)

    @property
    def logprobs(self) -> Float32Array:
        """[num_tokens], 0 where `loss_mask` is False; read-only view."""
        return self._view(self._logprobs)

    @property
    def policy_versions(self) -> Int32Array:
        """[num_tokens], `CONTEXT_VERSION` where `loss_mask` is False; read-only view."""
        return self._view(self._policy_versions)

    @property
    def loss_mask(self) -> BoolArray:
        """[num_tokens], True where a policy sampled the token; read-only view."""
        return self._view(self._loss_mask)

    @property
    def support_counts(self) -> Int32Array | None:
        """[num_tokens], the `counts` of `Supports`, 0 for context; None where every token was sampled from the whole
        vocabulary. Read-only view."""
        return None if self._support_counts is None else self._view(self._support_counts)

    @property
    def support_ids(self) -> tuple[Int32Array, ...]:
        """Their token ids, completion after completion: [num_support_ids] together."""
        return tuple(self._support_ids)

    @property
    def num_support_ids(self) -> int:
        """Token ids in the supports of all its tokens."""
        return self._num_support_ids

    def _add_supports(self, supports: Supports, where: slice) -> None:
        """Token ids stay in the completion's own array: they may be hundreds for each token."""
        if self._support_counts is None:
            self._support_counts = np.zeros(len(self._token_ids), np.int32)
        self._support_counts[where] = supports.counts
        self._support_ids.append(supports.token_ids)
        self._num_support_ids += len(supports.token_ids)

    def _count_versions(self, versions: Int32Array) -> None:
        counts = self._version_counts
        oldest, newest = int(versions[versions.argmin()]), int(versions[versions.argmax()])
        if oldest == newest:  # all but always
            counts[oldest] = counts.get(oldest, 0) + len(versions)
            return
        for version, count in _counted(versions).items():
            counts[version] = counts.get(version, 0) + count

    def _view(self, column: NDArray[ScalarT]) -> NDArray[ScalarT]:
        view = column[: self._num_tokens]
        readonly(view)
        return view

    def _grow(self, count: int) -> slice:
        start, end = self._num_tokens, self._num_tokens + count
        if end > len(self._token_ids):
            old = self._columns()
            self._allocate(max(end, 2 * len(self._token_ids)))
            for before, after in zip(old, self._columns(), strict=True):
                after[:start] = before[:start]
            if (counts := self._support_counts) is not None:
                self._support_counts = np.zeros(len(self._token_ids), np.int32)
                self._support_counts[:start] = counts[:start]
        self._num_tokens = end
        return slice(start, end)

    def _allocate(self, capacity: int) -> None:
        """Columns that hold nothing but context, so that appending context is to append its token ids."""
        self._token_ids: Int32Array = np.empty(capacity, np.int32)
        self._logprobs: Float32Array = np.zeros(capacity, np.float32)
        self._policy_versions: Int32Array = np.empty(capacity, np.int32)
        self._policy_versions.fill(CONTEXT_VERSION)
        self._loss_mask: BoolArray = np.zeros(capacity, np.bool_)

    def _columns(self) -> tuple[Int32Array, Float32Array, Int32Array, BoolArray]:
        return self._token_ids, self._logprobs, self._policy_versions, self._loss_mask


def _counted(versions: Int32Array) -> dict[int, int]:
    """How often each occurs."""
    found, counts = np.unique(versions, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
