r"""Decoupled PPO: what was sampled weighs one thing, how far the steps of one batch may go is another.

    L_t = -w_t min(s_t A_t, clip(s_t, 1 - ε_low, 1 + ε_high) A_t)
    w_t = π_prox(y_t) / μ(y_t),   s_t = π(y_t) / π_prox(y_t)

over the planned tokens; a token with w_t > C is rejected. π_prox, the proximal policy, is the policy as it was before
the first of the optimizer steps that a batch is trained on (`trainer.steps_per_batch`): w corrects for what older
weights sampled, the clip holds back these steps alone. Hilton, Cobbe and Schulman 2021, "Batch size-invariance for
policy optimization" (arXiv:2110.00641); for stale rollouts Fu et al. 2025, "AReaL: A Large-Scale Asynchronous
Reinforcement Learning System" (arXiv:2505.24298), whose code rejects by C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.clipped_surrogate import clipped_surrogate, clipped_tokens
from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import as_ratios, ratios
from tailrace.training.settings.losses import DecoupledPpoSettings

PROXIMAL_LOGPROBS = "proximal_logprobs"
"""The column of `LossTokens` with log π_prox, [num_loss_tokens]; in a batch's first step, where π is π_prox, none."""


@dataclass(frozen=True, slots=True)
class DecoupledPpo(PointwiseLoss):
    """It rejects what the proximal policy finds much likelier than the generator did."""

    settings: DecoupledPpoSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative of s by log π is s."""
        weights, steps = _factors(logprobs, tokens)
        loss, derivative = clipped_surrogate(steps, tokens.advantages, self.settings)
        return weights * loss, weights * derivative, ~self._rejects(weights)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were clipped, and which rejected."""
        weights, steps = _factors(logprobs, tokens)
        return {
            "training/clip_share": clipped_tokens(steps, tokens.advantages, self.settings),
            "training/rejected_share/decoupled_ppo": self._rejects(weights),
        }

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """w s, which is π / μ."""
        return ratios(logprobs, tokens)

    def _rejects(self, weights: Tensor) -> Tensor:
        return weights > self.settings.highest_weight


def _factors(logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """w and s, [num_loss_tokens]; s is 1 where w is 0, since both policies may have made the token impossible."""
    proximal = tokens.columns.get(PROXIMAL_LOGPROBS, logprobs)
    weights = as_ratios(proximal - tokens.logprobs)
    return weights, as_ratios(torch.where(weights == 0, 0.0, logprobs - proximal))
