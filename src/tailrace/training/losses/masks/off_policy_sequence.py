r"""Off-policy sequence masking (OPSM): what went wrong is not learned from a policy that has long been left.

    rejected where A_t < 0 and 1/|o| Σ_t log(μ(y_t) / π_θ(y_t)) > δ, over the |o| tokens that bear loss

DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556), eq. 9. Sequences with a positive advantage are kept: to make more
likely what the policy has become unlikely to say does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.masks.protocol import Mask
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import log_ratios
from tailrace.training.settings.masks import OffPolicySequenceSettings


@dataclass(frozen=True, slots=True)
class OffPolicySequence(Mask):
    """Tokens with a negative advantage by the divergence of their sequence."""

    settings: OffPolicySequenceSettings

    @override
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        divergence = -tokens.mean_by_sample(log_ratios(logprobs, tokens))
        return (tokens.advantages >= 0) | tokens.spread(divergence <= self.settings.threshold)
