r"""SAPO: a soft gate in place of PPO's clip.

    J = 1/G Σ_i 1/|o_i| Σ_t f_it(r_it) A_it,   r_it = π_θ(y_it) / μ(y_it)
    f(r) = 4/τ σ(τ (r - 1)),   τ = τ_pos where A_it > 0, else τ_neg

over the G sequences of a batch, |o_i| the tokens of sequence i that bear loss; σ is the logistic function. Gao et al.
2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347), with its temperatures of 1 and 1.05. The gradient is that
of w A log π with

    w(r) = r f'(r) = 4 r p (1 - p),   p = σ(τ (r - 1))

which is 1 at r = 1 and fades on both sides, sooner where the advantage is negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import ratios
from tailrace.training.settings.losses import SapoSettings


@dataclass(frozen=True, slots=True)
class Sapo(PointwiseLoss):
    """-f(r) A of each token; it keeps all."""

    settings: SapoSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        temperature = self._temperatures(tokens)
        gate = torch.sigmoid(temperature * (ratios(logprobs, tokens) - 1))
        loss = -4 / temperature * gate * tokens.advantages
        derivative = -self.importance_weights(logprobs, tokens) * tokens.advantages
        return loss, derivative, torch.ones_like(loss, dtype=torch.bool)

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """w(r)."""
        ratio = ratios(logprobs, tokens)
        gate = torch.sigmoid(self._temperatures(tokens) * (ratio - 1))
        return ratio * (4 * gate * (1 - gate))  # in this order: where the ratio overflows, the gate is 1

    def _temperatures(self, tokens: LossTokens) -> Tensor:
        positive, negative = self.settings.temperature_positive, self.settings.temperature_negative
        return torch.full_like(tokens.advantages, negative).masked_fill_(tokens.advantages > 0, positive)
