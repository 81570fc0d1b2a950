"""What top-p and top-k left of the vocabulary, for each token that was sampled from less than all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.records.arrays import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """The support of the distribution that each token was sampled from: a ragged column, token after token.

    A trainer renormalises its own probabilities over it, whatever its weights would have kept, so that both sides mean
    the same distribution. The token itself is always in its support.
    """

    token_ids: Int32Array  # [sum of counts]
    counts: Int32Array  # [num_tokens]; 0: the whole vocabulary

    def __post_init__(self) -> None:
        if self.counts.min(initial=0) < 0 or self.counts.sum(dtype=np.int64) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token ids are not the supports that {len(self.counts)} counts say")

    @classmethod
    def unrestricted(cls, num_tokens: int) -> Supports:
        """Of tokens sampled from the whole vocabulary."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens, np.int32))

    @classmethod
    def concatenated(cls, parts: Sequence[Supports]) -> Supports:
        """Those of several stretches of tokens, in order."""
        return cls(np.concatenate([part.token_ids for part in parts]), np.concatenate([part.counts for part in parts]))

    @property
    def num_tokens(self) -> int:
        """Tokens that it is of."""
        return len(self.counts)

    def at(self, places: NDArray[np.int64]) -> Supports:
        """Those of the tokens at `places`: a copy."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        counts = self.counts[places]
        return Supports(self.token_ids[ragged_places(starts[places], counts)], counts)

    def part(self, start: int, end: int) -> Supports:
        """Those of tokens `start` to `end`: views."""
        before = int(self.counts[:start].sum(dtype=np.int64))
        counts = self.counts[start:end]
        return Supports(self.token_ids[before : before + int(counts.sum(dtype=np.int64))], counts)


def ragged_places(starts: NDArray[np.int64], counts: Int32Array) -> NDArray[np.int64]:
    """[sum of counts]: the places of stretches that begin at `starts`, one after the other.

    >>> ragged_places(np.array([7, 2]), np.array([3, 2], np.int32))
    array([7, 8, 9, 2, 3])
    """
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    places: NDArray[np.int64] = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return places
