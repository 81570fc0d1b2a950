"""Probability ratios of the policy to the distribution that was sampled from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tailrace.training.losses.protocol import LossTokens

_LARGEST_LOGARITHM = {dtype: math.log(torch.finfo(dtype).max) * (1 - 1e-6) for dtype in (torch.float32, torch.float64)}
"""Whose exponential is finite, rounding included."""


def log_ratios(logprobs: Tensor, tokens: LossTokens) -> Tensor:
    """log π(y_t) - log μ(y_t), [num_loss_tokens]."""
    return logprobs - tokens.logprobs


def ratios(logprobs: Tensor, tokens: LossTokens) -> Tensor:
    """π(y_t) / μ(y_t), [num_loss_tokens]."""
    return as_ratios(log_ratios(logprobs, tokens))


def within(logarithms: Tensor, low: float, high: float) -> Tensor:
    """Whether their exponentials lie between `low` and `high`; compared as logarithms, which do not overflow."""
    return (logarithms >= (math.log(low) if low else -math.inf)) & (logarithms <= math.log(high))


def as_ratios(logarithms: Tensor) -> Tensor:
    """Their exponentials. What would overflow becomes about the largest number: 0 times it is 0, not NaN."""
    return logarithms.clamp(max=_LARGEST_LOGARITHM[logarithms.dtype]).exp()


def excess(logarithms: Tensor) -> Tensor:
    """How much their exponentials exceed 1, exact for small ones; what would overflow as in `as_ratios`."""
    return logarithms.clamp(max=_LARGEST_LOGARITHM[logarithms.dtype]).expm1()


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """w x of each token; 0 where w is, also where x is infinite: of r log π that is the limit."""
    return torch.where(weights == 0, 0.0, weights * values)
