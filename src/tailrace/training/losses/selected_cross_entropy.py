r"""Cross-entropy of what was better than its group: rejection-sampling fine-tuning.

    L = -1/N Σ_t log π(y_t)   over the N tokens with A_t > 0; the others are rejected

No ratio corrects for who sampled: what was selected is imitated, whoever said it. Dong et al. 2023, "RAFT: Reward
rAnked FineTuning" (arXiv:2304.06767), Yuan et al. 2023, "Scaling Relationship on Learning Mathematical
Reasoning" (arXiv:2308.01825, RFT), where the best of a group is selected; here it is what `scheduling.advantage` finds
above 0, that is above the mean of its group. It narrows the policy faster than a policy gradient does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.settings.losses import SelectedCrossEntropySettings


@dataclass(frozen=True, slots=True)
class SelectedCrossEntropy(PointwiseLoss):
    """-log π of each token with an advantage above 0; it rejects the others, and what has become impossible."""

    settings: SelectedCrossEntropySettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        kept = (tokens.advantages > 0) & (logprobs != -math.inf)
        return (-logprobs).where(kept, 0.0), -torch.ones_like(logprobs), kept

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens are not imitated."""
        return {"training/rejected_share/selected_cross_entropy": ~self.with_derivative(logprobs, tokens)[2]}
