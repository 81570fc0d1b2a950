r"""What losses with a clipped ratio share: PPO's surrogate and its derivative, where its weight may be truncated.

    L = -min( min(r, C) A,  clip(r, 1 - ε_low, 1 + ε_high) A )

(Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, eq. 7, where C is infinite.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import ratios


class ClipSettings(Protocol):
    """The bounds of a clip."""

    @property
    def clip_low(self) -> float:
        """ε_low."""
        ...

    @property
    def clip_high(self) -> float:
        """ε_high."""
        ...


@dataclass(frozen=True, slots=True)
class ClippedSurrogate(PointwiseLoss):
    """The surrogate with C infinite; it keeps all tokens."""

    settings: ClipSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        loss, derivative = clipped_surrogate(ratios(logprobs, tokens), tokens.advantages, self.settings)
        return loss, derivative, torch.ones_like(loss, dtype=torch.bool)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were clipped."""
        return {"training/clip_share": clipped_tokens(ratios(logprobs, tokens), tokens.advantages, self.settings)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """r."""
        return ratios(logprobs, tokens)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: ClipSettings, truncation: float = math.inf
) -> tuple[Tensor, Tensor]:
    """The surrogate, and its derivative by log π; all are [num_loss_tokens].

    The derivative is that of -sg[min(r, C)] A log π, and 0 where the clipped branch is the smaller one. Below C this
    is the derivative of the value, since ∇r = r ∇log π; above it the value would have none.
    """
    surrogate = ratio.clamp(max=truncation) * advantages
    bound = ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high) * advantages
    return -torch.minimum(surrogate, bound), torch.where(bound < surrogate, 0.0, -surrogate)


def clipped_tokens(ratio: Tensor, advantages: Tensor, clip: ClipSettings) -> Tensor:
    """Which tokens the clip takes the gradient of, [num_loss_tokens]."""
    above = (advantages > 0) & (ratio > 1 + clip.clip_high)
    return above | ((advantages < 0) & (ratio < 1 - clip.clip_low))
