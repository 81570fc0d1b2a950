"""How likely a model finds tokens that are given to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.records.arrays import Float32Array, Int32Array

NO_TOKEN = -1
"""In the place of a token id where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities at temperature 1 over the whole vocabulary, each token after those before it; the first has
    nothing before it, and 0."""

    logprobs: Float32Array
    """[num_tokens]: of the tokens that were given."""
    top_ids: Int32Array
    """[num_tokens, k]: the likeliest tokens in their places, in falling order; `NO_TOKEN` where there are fewer."""
    top_logprobs: Float32Array
    """[num_tokens, k]: theirs; 0 where there is none."""

    def __post_init__(self) -> None:
        count = len(self.logprobs)
        for name in ("top_ids", "top_logprobs"):
            column = getattr(self, name)
            if column.ndim == 1:  # arrays lie flat in messages
                object.__setattr__(self, name, column.reshape(count, len(column) // max(1, count)))
        if not self.top_ids.shape == self.top_logprobs.shape == (count, self.top_ids.shape[1]):
            raise ValueError(f"scores of {count} tokens came with {self.top_ids.shape} and {self.top_logprobs.shape}")

    @classmethod
    def of_entries(
        cls,
        token_ids: Int32Array,  # [num_tokens]
        counts: NDArray[np.int64],  # [num_tokens]
        entry_ids: NDArray[np.int64],  # [sum of counts]
        entry_logprobs: Float32Array,  # [sum of counts]
        *,
        top_k: int,
        vocabulary: int,
    ) -> TokenScores:
        """Of each token `counts` entries, in any order: its own, and those of tokens that are likely in its place.

        Ids from `vocabulary` on are no tokens, and left out. Raises `ValueError` where a token has no entry of its own,
        or one that is not finite.

        >>> ids, logprobs = np.array([7, 5, 9]), np.array([-3.0, -0.1, -2.0], np.float32)
        >>> scores = TokenScores.of_entries(np.array([7]), np.array([3]), ids, logprobs, top_k=2, vocabulary=10)
        >>> scores.logprobs.tolist(), scores.top_ids.tolist()
        ([-3.0], [[5, 9]])
        """
        if not np.isfinite(entry_logprobs).all():
            raise ValueError("a log-probability is not finite")
        rows = np.repeat(np.arange(len(token_ids)), counts)
        own = np.flatnonzero(entry_ids == token_ids[rows])
        if not np.array_equal(rows[own], np.arange(len(token_ids))):
            raise ValueError("a token has no log-probability of its own")
        scores = cls.unknown(len(token_ids), top_k)
        scores.logprobs[:] = entry_logprobs[own]
        if top_k:
            order = np.lexsort((-entry_logprobs, rows))
            order = order[entry_ids[order] < vocabulary]
            ranks = np.arange(len(order)) - np.searchsorted(rows[order], rows[order])
            order, ranks = order[ranks < top_k], ranks[ranks < top_k]
            scores.top_ids[rows[order], ranks] = entry_ids[order]
            scores.top_logprobs[rows[order], ranks] = entry_logprobs[order]
        return scores

    @classmethod
    def unknown(cls, count: int, top_k: int) -> TokenScores:
        """Of so many tokens that have none."""
        top_ids, zeros = np.full((count, top_k), NO_TOKEN, np.int32), np.zeros((count, top_k), np.float32)
        return cls(np.zeros(count, np.float32), top_ids, zeros)

    @classmethod
    def joined(cls, parts: list[TokenScores]) -> TokenScores:
        """Those of one sequence, of which `parts` are, in order."""
        return cls(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )
