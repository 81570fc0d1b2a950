"""Draws one token per row by the inverse of the cumulative distribution, at one uniform number per row.

An exponential race (Gumbel-max) needs a random number per vocabulary entry, which costs more than the model's output
layer on a CPU. The numbers are counter-based (SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014), of the request's seed and the token's place, so that they do not depend on other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.records import Float32Array, Int32Array
from tailrace.records.arrays import BoolArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

SampleAll: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Does the same for float32 logits where all of a row's tokens count: of logits, temperatures and draws, token ids and
log-probabilities."""


class SampledSupports(NamedTuple):
    """What the rows that asked for it were sampled from."""

    token_ids: Int32Array
    """Row after row, the likeliest first."""
    counts: Int32Array
    """[rows]; 0 where a row did not ask."""


class Sampled(NamedTuple):
    """One token of each row."""

    token_ids: NDArray[np.int64]  # [rows]
    logprobs: Float32Array  # [rows]
    supports: SampledSupports | None = None
    """None where no row asked."""


def uniforms(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Number `places[i]` of the stream of `seeds[i]`, in [0, 1).

    >>> one, other = uniforms(np.array([7, 7], np.uint64), np.array([0, 1]))
    >>> bool(0 <= one < 1 and one != other)
    True
    """
    with np.errstate(over="ignore"):
        state = _mixed(seeds + _GOLDEN) + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mixed(state)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    temperatures: Float32Array,  # [rows]; 0 is greedy
    top_ps: Float32Array,  # [rows]
    top_ks: Int32Array,  # [rows]; 0 keeps all
    draws: NDArray[np.float64],  # [rows], in [0, 1)
    returns_supports: BoolArray | None = None,  # [rows], True only where top-p or top-k restrict a row
    sample_all: SampleAll | None = None,
) -> Sampled:
    """Token ids and their log-probabilities in float32 under the distribution sampled from.

    A greedy row's log-probability is that of temperature 1. Rows with logits that are not finite come back with a
    log-probability that is not finite. Waits for the device once, and once more where supports are asked for.
    """
    narrowed = np.flatnonzero(((top_ps < 1) | (top_ks > 0)) & (temperatures > 0))
    if sample_all is not None and logits.dtype is torch.float32 and not len(narrowed):
        columns = (torch.from_numpy(np.ascontiguousarray(column)) for column in (temperatures, draws))
        token_ids, chosen_logprobs = sample_all(logits.contiguous(), *columns)
        return Sampled(token_ids.numpy(), chosen_logprobs.numpy())
    scores = logits.float()
    if not (temperatures == 1).all():
        scores = scores / _column(np.where(temperatures > 0, temperatures, 1), scores)
    elif scores is logits:
        scores = scores.clone()
    kept = None
    if len(narrowed):
        rows = torch.from_numpy(narrowed).to(scores.device)
        kept = _Kept.of(scores[rows], top_ps[narrowed], top_ks[narrowed])
        scores[rows] = kept.scores
    highest, best = scores.max(dim=-1, keepdim=True)
    cumulative = (scores - highest).exp_().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not temperatures.any():
        chosen = best
    else:
        below = torch.nextafter(total, torch.zeros_like(total))  # a draw that rounds up must not leave the vocabulary
        points = torch.minimum(total * _column(draws, total), below)
        chosen = torch.searchsorted(cumulative, points, right=True).clamp_(max=scores.shape[-1] - 1)
        if not temperatures.all():
            chosen = torch.where(_column(temperatures, scores) > 0, chosen, best)
    logprobs = scores.gather(1, chosen) - highest - total.log()
    both = torch.cat([chosen.double(), logprobs.double()], dim=1).cpu().numpy()
    supports = None
    if kept is not None and returns_supports is not None and returns_supports.any():
        supports = kept.supports(narrowed, returns_supports)
    return Sampled(both[:, 0].astype(np.int64), both[:, 1].astype(np.float32), supports)


class _Kept(NamedTuple):
    """What top-k, then top-p, leave of rows of the vocabulary: of tokens in falling order the first few."""

    scores: torch.Tensor  # [rows, vocabulary], -inf for all others
    order: torch.Tensor  # [rows, widest], token ids
    counts: torch.Tensor  # [rows], at least 1

    @classmethod
    def of(cls, scores: torch.Tensor, top_ps: Float32Array, top_ks: Int32Array) -> _Kept:
        widest = scores.shape[-1]
        if (top_ks > 0).all():
            widest = min(widest, int(top_ks.max()))
        ordered, order = scores.topk(widest) if widest < scores.shape[-1] else scores.sort(dim=-1, descending=True)
        top_p, top_k = _column(top_ps, scores), _column(np.where(top_ks > 0, top_ks, widest), scores)
        ranks = torch.arange(widest, device=scores.device)
        ordered = ordered.masked_fill(ranks >= top_k, -math.inf)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        reached = (before >= top_p) & (top_p < 1)  # rounding reaches 1 before the last token does
        counts = ((ordered > -math.inf) & ~reached).sum(dim=-1, keepdim=True).clamp_(min=1)
        ordered = ordered.masked_fill(ranks >= counts, -math.inf)
        return cls(torch.full_like(scores, -math.inf).scatter_(1, order, ordered), order, counts.squeeze(1))

    def supports(self, rows: NDArray[np.int64], returned: BoolArray) -> SampledSupports:
        """Those of the `returned` among all rows, of which these are `rows`."""
        counts = np.zeros(len(returned), np.int32)
        counts[rows] = self.counts.cpu().numpy()
        counts[~returned] = 0
        own = counts[rows]
        order = self.order[:, : int(own.max())].to(torch.int32).cpu().numpy()
        return SampledSupports(order[np.arange(order.shape[1]) < own[:, None]], counts)


def _column(values: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=like.device, dtype=like.dtype).unsqueeze(1)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
