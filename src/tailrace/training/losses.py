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

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.training.head import HeadOutput
from tailrace.training.settings import LossSettings

_MAX_LOG_RATIO = 20.0
"""Ratios above e^20 are one and the same catastrophe; the bound keeps metrics finite in float32."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What the loss knows of the tokens that bear it; every tensor is [num_loss_tokens]."""

    targets: Tensor
    """Token ids, int64."""
    logprobs: Tensor
    """Of the generator, float32."""
    advantages: Tensor
    """float32."""
    inverse_temperatures: Tensor
    """1 / temperature of each token's sample: logits are multiplied by it."""

    def part(self, where: slice) -> LossTokens:
        """The tokens of a slice, as views."""
        return LossTokens(
            self.targets[where], self.logprobs[where], self.advantages[where], self.inverse_temperatures[where]
        )


def policy_loss(
    logprobs: Tensor, tokens: LossTokens, settings: LossSettings, denominator: float
) -> tuple[Tensor, Tensor]:
    """Loss per token and its derivative by `logprobs`, both already divided by `denominator`.

    `logprobs`, [num_loss_tokens], are the trainer's. The derivative is written out (see the module) because truncation
    makes it differ from that of the value.
    """
    advantages = tokens.advantages / denominator
    if settings.correction == "none":
        return -advantages * logprobs, -advantages
    ratio = (logprobs - tokens.logprobs).clamp(max=_MAX_LOG_RATIO).exp()
    truncated = ratio.clamp(max=settings.truncation)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate, bound = truncated * advantages, clipped * advantages
    loss = -torch.minimum(surrogate, bound)
    return loss, torch.where(bound < surrogate, 0.0, -truncated * advantages)


@dataclass(slots=True)
class LossSums:
    """Sums over the tokens of a batch, that become metrics. Float64 on the host: one read per micro-batch."""

    tokens: float = 0.0
    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    difference: float = 0.0
    fresh_tokens: float = 0.0
    fresh_difference: float = 0.0
    mixed_tokens: float = 0.0
    mixed_difference: float = 0.0

    def add(
        self, output: HeadOutput, tokens: LossTokens, *, fresh: Tensor, mixed: Tensor, settings: LossSettings
    ) -> None:
        """Add one micro-batch; `fresh` and `mixed` as in `MicroBatch`.

        The divergence from the generator is the k3 estimate of KL(μ ‖ π_θ): E_μ[r - 1 - log r]
        (Schulman 2020, "Approximating KL divergence").
        """
        if not len(output.logprobs):
            return
        log_ratio = (output.logprobs - tokens.logprobs).clamp(max=_MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        difference = log_ratio.abs()
        above = (tokens.advantages > 0) & (ratio > 1 + settings.clip_high)
        below = (tokens.advantages < 0) & (ratio < 1 - settings.clip_low)
        sums = torch.stack(
            [
                output.token_losses.sum(),
                (ratio - 1 - log_ratio).sum(),
                output.entropy.sum(),
                (above | below).sum().float(),
                ratio.sum(),
                ratio.max(),
                difference.sum(),
                fresh.sum().float(),
                (difference * fresh).sum(),
                mixed.sum().float(),
                (difference * mixed).sum(),
            ]
        ).tolist()
        self.tokens += len(output.logprobs)
        self.loss += sums[0]
        self.kl += sums[1]
        self.entropy += sums[2]
        self.clipped += sums[3] if settings.correction == "truncated_is" else 0.0
        self.ratio += sums[4]
        self.ratio_max = max(self.ratio_max, sums[5])
        self.difference += sums[6]
        self.fresh_tokens += sums[7]
        self.fresh_difference += sums[8]
        self.mixed_tokens += sums[9]
        self.mixed_difference += sums[10]

    def metrics(self) -> dict[str, float]:
        """Metrics of the batch, by their names in the table. Nothing fresh, or nothing mixed: no figure for it."""
        tokens = max(self.tokens, 1.0)
        metrics = {
            "training/loss": self.loss,
            "training/kl": self.kl / tokens,
            "training/entropy": self.entropy / tokens,
            "training/clip_share": self.clipped / tokens,
            "training/ratio_mean": self.ratio / tokens,
            "training/ratio_max": self.ratio_max,
            "training/logprob_difference": self.difference / tokens,
        }
        if self.fresh_tokens:
            metrics["training/logprob_difference_fresh"] = self.fresh_difference / self.fresh_tokens
        if self.mixed_tokens:
            metrics["training/logprob_difference_mixed"] = self.mixed_difference / self.mixed_tokens
        return metrics
