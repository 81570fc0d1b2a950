r"""The default loss: a clipped ratio against the generator's log-probabilities, its importance weight truncated.

An asynchronous trainer takes one optimizer step per batch, so the only old policy is the one that sampled: the
generator's, at the version each token carries, through the generator's own numerics. With

    r_t = exp(log π_θ(y_t) - log μ(y_t)),   μ the distribution that y_t was sampled from,

the objective of a batch with N planned loss tokens is

    J = 1/N Σ_t min( min(r_t, C) A_t,  clip(r_t, 1 - ε_low, 1 + ε_high) A_t ).

- The clipped surrogate is eq. 7 of PPO (Schulman et al. 2017, arXiv:1707.06347), with separate bounds as in DAPO's
  "clip-higher" (Yu et al. 2025, arXiv:2503.14476, eq. 10), and DAPO's token-level mean over the whole batch (eq. 12).
- PPO leaves the weight of a token with A_t < 0 and r_t ≫ 1 unbounded. Truncated importance sampling bounds it:
  the gradient is that of sg[min(r_t, C)] A_t log π_θ(y_t) (Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561, §4.1
  for the truncation ρ̄; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", for
  the mismatch between trainer and generator). Below C this is exactly PPO's gradient, since ∇r = r ∇log π.

So dJ/d log π_θ(y_t) = w_t A_t / N with w_t = min(r_t, C), or 0 where the clipped branch is the smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.clipped_surrogate import clipped_surrogate, clipped_tokens
from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import ratios
from tailrace.training.settings.losses import ClippedRatioSettings


@dataclass(frozen=True, slots=True)
class ClippedRatio(PointwiseLoss):
    """-min(min(r, C) A, clip(r) A) of each token (see the module); it keeps all."""

    settings: ClippedRatioSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Without correction -A log π, and its derivative."""
        settings, advantages, kept = self.settings, tokens.advantages, torch.ones_like(logprobs, dtype=torch.bool)
        if settings.correction == "none":
            return -advantages * logprobs, -advantages, kept
        ratio = ratios(logprobs, tokens)
        return *clipped_surrogate(ratio, advantages, settings, settings.truncation), kept

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were clipped."""
        if self.settings.correction == "none":
            return {"training/clip_share": torch.zeros_like(logprobs, dtype=torch.bool)}
        return {"training/clip_share": clipped_tokens(ratios(logprobs, tokens), tokens.advantages, self.settings)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """min(r, C)."""
        if self.settings.correction == "none":
            return torch.ones_like(logprobs)
        return ratios(logprobs, tokens).clamp(max=self.settings.truncation)
