r"""GSPO: one importance ratio for each sequence, clipped as a whole.

    J = 1/G Σ_i 1/|o_i| Σ_t min( s_i A_it,  clip(s_i, 1 - ε_low, 1 + ε_high) A_it )
    s_i = (Π_t r_it)^(1/|o_i|),   r_it = π_θ(y_it) / μ(y_it)

over the G sequences of a batch, |o_i| the tokens of sequence i that bear loss. Zheng et al. 2025, "Group Sequence
Policy Optimization" (arXiv:2507.18071), eq. 5 and 7, with the bounds of its §5.1, 3e-4 and 4e-4: a mean over a sequence
moves far less than a token. All of a sequence's tokens weigh the same, which calms mixture-of-experts models; the paper
clips a hundred times as many tokens as GRPO does. Advantages are those of sequences, or of tokens where a scorer gives
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.training.losses.clipped_surrogate import clipped_tokens
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import as_ratios, log_ratios
from tailrace.training.settings.losses import GspoSettings


@dataclass(frozen=True, slots=True)
class Gspo:
    """-min(s A, clip(s) A) of each token; it keeps all."""

    settings: GspoSettings

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        """-min(s A, clip(s) A) of each token, and that all are kept."""
        ratio = self.importance_weights(logprobs, tokens)
        clipped = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
        return loss, torch.ones_like(loss, dtype=torch.bool)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were clipped, with their sequences."""
        ratio = self.importance_weights(logprobs, tokens)
        return {"training/clip_share": clipped_tokens(ratio, tokens.advantages, self.settings)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """s of each token's sequence."""
        return tokens.spread(as_ratios(tokens.mean_by_sample(log_ratios(logprobs, tokens))))
