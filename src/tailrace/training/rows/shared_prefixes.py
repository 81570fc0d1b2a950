"""Tokens that several samples of a row begin with are computed once.

Rollouts of a group begin with the same prompt, branches of a rollout with the same turns. Under causal attention equal
prefixes have equal hidden states: what treats tokens one by one (nearly all of a model) computes them once, attention
gathers them into every segment that starts with them, and the gradient of a shared token is the sum over its segments.

With router replay, tokens are equal only where their records are: a prefix is shared up to the first token whose
samples recorded different experts. Where one recorded nothing (its cache was copied, say), the other's record is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.records import ExpertArray, Int32Array, unrecorded


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Which tokens of a row are computed, and where each token is found; both [num_tokens] of the plain row."""

    computed: NDArray[np.bool_]
    place: NDArray[np.int64]
    """Among the computed tokens, in row order."""

    def gather_experts(self, routed_experts: ExpertArray) -> ExpertArray:
        """Of [num_tokens of the plain row, layers, top_k] those of computed tokens; a copy, unless all are."""
        if self.computed.all():
            return routed_experts
        gathered: ExpertArray = routed_experts[self.computed]
        lacking = _is_unknown(gathered)
        others = np.flatnonzero(~self.computed)
        others = others[lacking[self.place[others]]]
        others = others[~_is_unknown(routed_experts[others])]
        gathered[self.place[others]] = routed_experts[others]
        return gathered


def share_prefixes(
    token_ids: Int32Array, lengths: Sequence[int], routed_experts: ExpertArray | None = None
) -> SharedPrefixes:
    """Find the longest prefix that each sample shares with another, for samples of `lengths` side by side.

    In lexicographic order no two samples share more than neighbours do, so comparing neighbours finds everything.
    Unknown entries of `routed_experts` [num_tokens, layers, top_k] are filled in from the sample shared with.

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
    if routed_experts is not None:
        for index, (before, sample) in enumerate(itertools.pairwise(order), start=1):
            first, second = (routed_experts[starts[one] :][: common[index]] for one in (before, sample))
            common[index] = _merge_experts(first, second)
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


def _merge_experts(first: ExpertArray, second: ExpertArray) -> int:
    """Number of leading tokens whose routings do not contradict each other; what `second` lacks there is filled in."""
    is_known, is_lacking = ~_is_unknown(first), _is_unknown(second)
    contradicts = (first != second).any(axis=(1, 2)) & is_known & ~is_lacking
    agreed = int(contradicts.argmax()) if contradicts.any() else len(first)
    filled = np.flatnonzero((is_known & is_lacking)[:agreed])
    second[filled] = first[filled]
    return agreed


def _is_unknown(routed_experts: ExpertArray) -> NDArray[np.bool_]:
    """[num_tokens]: where nothing was recorded. A record is whole, so the first layer tells."""
    unknown: NDArray[np.bool_] = (routed_experts[:, 0] == unrecorded(routed_experts.dtype)).all(axis=1)
    return unknown
