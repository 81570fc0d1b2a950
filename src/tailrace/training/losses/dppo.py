r"""DPPO: a trust region over distributions in place of PPO's clipped ratio.

    J = 1/N Σ_t M_t r_t A_t,   r_t = π_θ(y_t) / μ(y_t)
    M_t = 0 where D_t > δ and the step would lead further away (A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1), else 1

over the N planned tokens, rejected ones included. Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement
Learning" (arXiv:2602.04879). D_t is a divergence of π_θ from μ at the token's place, of which the binary approximation
knows only "this token" and "any other":

    total variation: D_t = |π_θ(y_t) - μ(y_t)|
    KL:              D_t = μ(y_t) log(μ(y_t) / π_θ(y_t)) + (1 - μ(y_t)) log((1 - μ(y_t)) / (1 - π_θ(y_t)))

with the authors' δ of 0.15 and 0.05. Their top-k approximation needs the generator's probabilities of the k likeliest
tokens, which batches do not carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import log_ratios, ratios
from tailrace.training.settings.losses import DppoSettings


@dataclass(frozen=True, slots=True)
class Dppo(PointwiseLoss):
    """-r A of each token that it keeps."""

    settings: DppoSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative of -r A by log π is itself."""
        loss = -ratios(logprobs, tokens) * tokens.advantages
        return loss, loss, ~self._rejects(logprobs, tokens)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were rejected."""
        return {"training/rejected_share/dppo": self._rejects(logprobs, tokens)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """r."""
        return ratios(logprobs, tokens)

    def _rejects(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        divergence = _total_variation if self.settings.divergence == "total_variation" else _kl
        leads_away = tokens.advantages * log_ratios(logprobs, tokens) > 0
        return leads_away & (divergence(logprobs, tokens.logprobs) > self.settings.radius)


def _total_variation(policy: Tensor, generator: Tensor) -> Tensor:
    """Of the two binary distributions, from log-probabilities."""
    return (policy.exp() - generator.exp()).abs()


def _kl(policy: Tensor, generator: Tensor) -> Tensor:
    """KL(μ ‖ π) of the two binary distributions, from log-probabilities; 0 log 0 is 0."""
    other_policy, other_generator = -policy.expm1(), -generator.expm1()
    other: Tensor = torch.xlogy(other_generator, other_generator) - torch.xlogy(other_generator, other_policy)
    return generator.exp() * (generator - policy) + other
