"""Losses of users' own, as settings name them."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.training.losses import LossTokens


def overflowing(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """One that no gradient survives."""
    return logprobs * torch.inf, torch.ones_like(logprobs, dtype=torch.bool)


def steep(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Finite, and its gradient is infinite for rows with an advantage above 50."""
    is_steep = bool((tokens.advantages > 50).any())
    losses = (logprobs - logprobs.detach()).sqrt() if is_steep else tokens.advantages * logprobs
    return losses, torch.ones_like(logprobs, dtype=torch.bool)


def enormous(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Finite, and so is every gradient, but not the norm of all."""
    return logprobs * 1e30, torch.ones_like(logprobs, dtype=torch.bool)
