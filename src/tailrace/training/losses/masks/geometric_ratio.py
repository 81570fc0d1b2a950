r"""Whole sequences do not count whose tokens have changed too much on average.

    kept where low ≤ (Π_t r_t)^(1/|o|) ≤ high,   r_t = π_θ(y_t) / μ(y_t), over the |o| tokens that bear loss

The geometric mean does not know lengths, so one bound fits them all. Liu, Li et al. 2025, "When Speed Kills Stability:
Demystifying RL Collapse from the Training-Inference Mismatch" (richardli.xyz/rl-collapse); in verl's rollout correction
it is `seq_mean_k1`; SkyRL recommends the bounds 0.99 and 1.01.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.masks.protocol import Mask
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import log_ratios, within
from tailrace.training.settings.masks import GeometricRatioSettings


@dataclass(frozen=True, slots=True)
class GeometricRatio(Mask):
    """Sequences by the geometric mean of their ratios."""

    settings: GeometricRatioSettings

    @override
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        mean = tokens.mean_by_sample(log_ratios(logprobs, tokens))
        return tokens.spread(within(mean, self.settings.low, self.settings.high))
