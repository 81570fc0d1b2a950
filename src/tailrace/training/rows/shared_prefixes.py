"""Tokens that several samples of a row begin with are computed once.

Rollouts of a group begin with the same prompt, branches of a rollout with the same turns. Under causal attention equal
prefixes have equal hidden states: what treats tokens one by one (nearly all of a model) computes them once, attention
gathers them into every segment that starts with them, and the gradient of a shared token is the sum over its segments.

A GPU's attention wants every segment's keys and values side by side: there `PrefixCopies` lays out the plain row around
it, in every layer, and sums up gradients in a fixed order. That is worth it from some sharing on (`saves_enough`).

With router replay, tokens are equal only where their records are: a prefix is shared up to the first token whose
samples recorded different experts. Where one recorded nothing (its cache was copied, say), the other's record is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.records import ExpertArray, Int32Array, common_prefix, unrecorded

_LEAST_SAVED: Final = 1 / 8
"""Of a row's tokens. To lay a row out and take it back moves some 60 kB per token and layer of Qwen3-0.6B, a tenth of
the time that its products take on an H100, by bandwidth alone (not measured); wider models have it cheaper."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Which tokens of a row are computed, and where each token is found; both [num_tokens] of the plain row."""

    computed: NDArray[np.bool_]
    place: NDArray[np.int64]
    """Among the computed tokens, in row order."""

    @property
    def saves_enough(self) -> bool:
        """Whether attention may cost what `PrefixCopies` costs it."""
        return bool(np.count_nonzero(~self.computed) >= _LEAST_SAVED * len(self.place))

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


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCopies:
    """Where attention finds the tokens of a plain row among computed ones, and what it makes of them; all are int64."""

    place: Tensor
    """[num_tokens of the plain row]: each token among the computed ones."""
    own: Tensor
    """[num_computed]: each computed token in the plain row."""
    shared: Tensor
    """[num_shared]: those computed tokens that several samples have."""
    uses: Tensor
    """[num_uses]: where in the plain row these stand, one token's places after the other's."""
    offsets: Tensor
    """[num_shared + 1]: whose places begin where."""

    @classmethod
    def of(cls, prefixes: SharedPrefixes) -> PrefixCopies:
        """On the CPU."""
        counts = np.bincount(prefixes.place)
        by_place = np.argsort(prefixes.place, kind="stable")
        shared = np.flatnonzero(counts > 1)
        uses = by_place[np.repeat(counts > 1, counts)]
        columns = (
            prefixes.place,
            np.flatnonzero(prefixes.computed),
            shared,
            uses,
            np.concatenate([[0], np.cumsum(counts[shared])]),
        )
        return cls(*(torch.from_numpy(column.astype(np.int64)) for column in columns))

    def spread(self, tensor: Tensor) -> Tensor:
        """[num_tokens of the plain row, ...] of `tensor` [num_computed, ...]; the gradient of a token is the sum over
        its places, in their order and in float32 at least: the same bits each time, on a GPU too."""
        return _spread(tensor, self)

    def take(self, tensor: Tensor) -> Tensor:
        """[num_computed, ...] of `tensor` [num_tokens of the plain row, ...]."""
        return tensor.index_select(0, self.own)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copies: PrefixCopies) -> Tensor:
        ctx.copies = copies
        return tensor.index_select(0, copies.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        copies, wide = ctx.copies, torch.promote_types(grads[0].dtype, torch.float32)
        gradient = grads[0].index_select(0, copies.own)
        each = grads[0].index_select(0, copies.uses).to(wide)
        sums = torch.segment_reduce(each, "sum", offsets=copies.offsets, axis=0, unsafe=True)
        return gradient.index_copy_(0, copies.shared, sums.to(gradient.dtype)), None


_spread: Callable[[Tensor, PrefixCopies], Tensor] = _Spread.apply


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
    common = [0, *(common_prefix(samples[one], samples[other]) for one, other in itertools.pairwise(order))]
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
