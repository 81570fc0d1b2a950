"""The experts that vLLM routed each request's tokens to, collected over its steps.

vLLM returns rows [num_tokens, layers, top_k] with each step's output: first those of the prompt from
`routed_experts_prompt_start` on, then those of each forwarded token; layers without experts are zeros. On GPUs only,
where this is untested: the tests cover this module over vLLM's own type of output.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.recent import RecentTable
from tailrace.records import ExpertArray, GenerationRequest, Int32Array, SessionId

_FIRST_ROWS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """A session's tokens of which it was handed the experts, all but the last: how many, and what they were."""

    num_tokens: int
    digest: int

    @classmethod
    def of(cls, token_ids: Int32Array) -> Mark:
        """After these tokens."""
        return cls(len(token_ids), xxhash.xxh3_64_intdigest(token_ids.tobytes()))

    def begins(self, context: Int32Array) -> bool:
        """Whether `context` begins with its tokens."""
        return len(context) >= self.num_tokens and Mark.of(context[: self.num_tokens]) == self


class DeliveredExperts:
    """Up to which position each session was handed experts, so that its next turn does not get them again.

    What an aborted request was handed counts for one that continues it, and not for one that starts over.
    """

    def __init__(self) -> None:
        self._sessions = RecentTable[SessionId, tuple[Mark | None, Mark]]()

    def start(self, request: GenerationRequest) -> int:
        """First position that the request is to be handed; 0 where its session's history was rewritten."""
        ended, last = self._sessions.get(request.session_id) or (None, None)
        mark = last if request.prefix is not None else ended
        return mark.num_tokens - 1 if mark is not None and mark.begins(request.context_token_ids) else 0

    def note(self, request: GenerationRequest, experts: ReturnedExperts, *, aborted: bool) -> None:
        """The request is handed these."""
        mark = experts.mark
        if mark is None:
            return
        ended, _ = self._sessions.get(request.session_id) or (None, None)
        self._sessions[request.session_id] = (ended if aborted else mark, mark)


class ReturnedExperts:
    """The rows of one request with this context, from position `start` on, in an array that grows."""

    def __init__(self, context: Int32Array, start: int) -> None:
        self.start = start
        self._num_tokens, self._hash = len(context), xxhash.xxh3_64(context.tobytes())
        self._rows: ExpertArray | None = None
        self._count = 0
        self._is_whole = True

    @property
    def mark(self) -> Mark | None:
        """Prompt and completion, as far as it was sampled; None where not all of their rows are there."""
        is_there = self._is_whole and 0 < self._num_tokens - 1 - self.start <= self._count
        return Mark(self._num_tokens, self._hash.intdigest()) if is_there else None

    def take(self, rows: NDArray[np.generic], sampled: int) -> None:
        """What the output brought that sampled so many tokens; `sampled` follows.

        Rows that do not go on where the last ones ended would be taken for those of other tokens: then all are dropped.
        """
        end, expected = self._count + len(rows), self._num_tokens + sampled - 1 - self.start
        if end != expected and self._is_whole:
            _log.warning("vLLM returned the experts of %d tokens, expected %d: the request goes without", end, expected)
            self._is_whole = False
        if not self._is_whole:
            return
        if self._rows is None or end > len(self._rows):
            self._grow(rows, end)
        assert self._rows is not None
        self._rows[self._count : end] = rows
        self._count = end

    def sampled(self, token_ids: Int32Array) -> None:
        """These tokens were sampled, and are kept."""
        self._num_tokens += len(token_ids)
        self._hash.update(token_ids.tobytes())

    def whole(self) -> ExpertArray | None:
        """[positions, layers, top_k] of all tokens but the last and those before `start`; None where there are none."""
        count = min(self._count, self._num_tokens - 1 - self.start)
        return self._rows[:count].copy() if self._rows is not None and self._is_whole and count > 0 else None

    def _grow(self, rows: NDArray[np.generic], size: int) -> None:
        grown = np.empty((max(_FIRST_ROWS, 2 * size), *rows.shape[1:]), rows.dtype)
        if self._rows is not None:
            grown[: self._count] = self._rows[: self._count]
        self._rows = grown
