"""Tokens that several samples of a row begin with go through the model once.

The rollouts of a group begin with the same prompt, branches of a rollout with the same turns. Under causal attention
equal beginnings have equal hidden states, so all samples can point at one copy of them: whatever treats tokens one by
one (nearly all of a model) computes it once, and attention gathers it into every segment that starts with it. The
gradient of a shared token is the sum over its segments, exactly as if each had its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.records import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Which tokens of a row are computed, and where every token finds its own; both [num_tokens] of the plain row."""

    computed: NDArray[np.bool_]
    place: NDArray[np.int64]
    """Among the computed tokens, in row order."""


def share_prefixes(token_ids: Int32Array, lengths: Sequence[int]) -> SharedPrefixes:
    """Find the longest beginning that each sample shares with another, for samples of `lengths` side by side.

    In lexicographic order no two samples share more than neighbours do, so comparing neighbours finds everything.

    >>> shared = share_prefixes(np.array([5, 6, 1, 5, 6, 2, 3], np.int32), [3, 4])
    >>> shared.computed.tolist(), shared.place.tolist()
    ([True, True, True, False, False, True, True], [0, 1, 2, 0, 1, 3, 4])
    """
    ends = np.cumsum(lengths)
    samples = [token_ids[end - length : end] for end, length in zip(ends.tolist(), lengths, strict=True)]
    keys = [sample.astype(">u4").tobytes() for sample in samples]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    common = [0, *(_common_prefix(samples[one], samples[other]) for one, other in itertools.pairwise(order))]
    starts = (ends - np.asarray(lengths)).tolist()
    computed = np.ones(len(token_ids), np.bool_)
    for sample, count in zip(order, common, strict=True):
        computed[starts[sample] : starts[sample] + count] = False
    place = np.cumsum(computed) - 1
    for before, sample, count in zip(order, order[1:], common[1:], strict=False):
        place[starts[sample] : starts[sample] + count] = place[starts[before] : starts[before] + count]
    return SharedPrefixes(computed, place)


def _common_prefix(first: Int32Array, second: Int32Array) -> int:
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length
