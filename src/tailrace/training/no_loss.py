"""A pass through the policy that teaches nothing: what a rank does while the others have one row more than it has.

Ranks gather weights and sum gradients together, layer by layer, so that each takes part in every pass. Its gradients
are exactly 0: no token bears loss.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import BatchRow
from tailrace.training.losses import LossTokens, PointwiseLoss

_NUM_TOKENS = 2


class _NoLoss(PointwiseLoss):
    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        zeros = torch.zeros_like(logprobs)
        return zeros, zeros, torch.ones_like(logprobs, dtype=torch.bool)


NO_LOSS = _NoLoss()
"""In the place of a loss of one's own, which need not know what to do with no tokens."""


def empty_row() -> BatchRow:
    """The shortest row there is, without a token that bears loss."""
    return BatchRow(
        token_ids=np.zeros(_NUM_TOKENS, np.int32),
        logprobs=np.zeros(_NUM_TOKENS, np.float32),
        policy_versions=np.full(_NUM_TOKENS, -1, np.int32),
        loss_mask=np.zeros(_NUM_TOKENS, np.bool_),
        mixed_cache=np.zeros(_NUM_TOKENS, np.bool_),
        advantages=np.zeros(_NUM_TOKENS, np.float32),
        temperatures=np.ones(1, np.float32),
        sample_lengths=np.array([_NUM_TOKENS], np.int32),
    )
