r"""The divergence of the policy from a frozen reference, estimated at the tokens that were sampled.

With π the policy, π_ref the reference, μ the distribution that y_t was sampled from, and

    δ = log π_ref(y_t) - log π(y_t),   r = π(y_t) / μ(y_t),

    estimator   added per token        its derivative by log π(y_t)
    k1          -δ                      1
    k2          δ² / 2                  -δ
    k3          e^δ - 1 - δ             1 - e^δ
    unbiased    r (e^δ - 1 - δ)         -r δ

k1 to k3 are those of Schulman 2020, "Approximating KL Divergence": means over y ~ π of k1 and k3 are KL(π ‖ π_ref).
What trains is the derivative, and that of a mean is no mean of derivatives: over y ~ π the derivative of k1 is 0 on
average, that of k2 is the gradient of KL(π ‖ π_ref), that of k3 is the gradient of KL(π_ref ‖ π), which grows without
bound where π ≪ π_ref (Liu et al. 2025, "Rethinking KL Regularization in RLHF", arXiv:2510.01555). GRPO adds k3 (Shao et
al. 2024, arXiv:2402.03300, eq. 4). `unbiased` is the "unbiased KL estimate" of DeepSeek-V3.2 (DeepSeek-AI 2025,
arXiv:2512.02556): differentiated through r too, it is the gradient of KL(π ‖ π_ref) for tokens that any μ sampled, at
the states that it came to.

The reference is at the temperature of each token's sample, as the policy is. Every planned token with a weight (1,
unless the column `reference_kl_weights` says) counts, those too that a mask or the loss rejects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.components import TokenComponent
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import excess, ratios, weighted
from tailrace.training.settings.components import ReferenceKlSettings

REFERENCE_LOGPROBS = "reference_logprobs"
"""The column of `LossTokens` that the trainer fills with log π_ref, [num_loss_tokens]."""


@dataclass(frozen=True, slots=True)
class ReferenceKl(TokenComponent):
    """One of the estimators of each token."""

    name: ClassVar = "reference_kl"
    settings: ReferenceKlSettings

    @override
    def of_token(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        difference = _difference(logprobs, tokens)
        match self.settings.estimator:
            case "k1":
                loss, derivative = -difference, torch.ones_like(difference)
            case "k2":
                loss, derivative = difference.square() / 2, -difference
            case "k3":
                loss, derivative = excess(difference) - difference, -excess(difference)
            case "unbiased":
                ratio = ratios(logprobs, tokens)
                derivative = -weighted(ratio, difference)
                loss = ratio * excess(difference) + derivative
        return loss, derivative

    @override
    def measure(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """The divergence by k3, whatever trains: one figure for all runs."""
        difference = _difference(logprobs, tokens)
        return excess(difference) - difference


def _difference(logprobs: Tensor, tokens: LossTokens) -> Tensor:
    """δ."""
    return tokens.columns[REFERENCE_LOGPROBS].to(logprobs.dtype) - logprobs
