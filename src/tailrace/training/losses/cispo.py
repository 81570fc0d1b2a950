r"""CISPO: no token loses its gradient; instead its importance weight is clipped.

    J = 1/N Σ_t sg[clip(r_t, w_low, w_high)] A_t log π_θ(y_t),   r_t = π_θ(y_t) / μ(y_t)

over the N tokens that are kept, here all of them; sg is the stop-gradient. MiniMax 2025, "MiniMax-M1"
(arXiv:2506.13585), eq. 4 and 5, which sets no lower bound, as here by default; the upper one of 5 is that of "The Art
of Scaling Reinforcement Learning Compute for LLMs" (arXiv:2510.13786), whose recipe takes this loss. Rare tokens that
turn an argument ("wait", "however") are those that PPO's clip would silence first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import ratios, weighted
from tailrace.training.settings.losses import AipoSettings, CispoSettings


@dataclass(frozen=True, slots=True)
class Cispo(PointwiseLoss):
    """-sg[clip(r)] A log π of each token; it keeps all."""

    settings: CispoSettings | AipoSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        slope = -self.importance_weights(logprobs, tokens) * tokens.advantages
        return weighted(slope, logprobs), slope, torch.ones_like(logprobs, dtype=torch.bool)

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """clip(r)."""
        return ratios(logprobs, tokens).clamp(self.settings.lowest_weight, self.settings.truncation)
