"""Passes through the policy that teach nothing: what a rank does while the others have one row more than it has, and
how a model is tried out.

Ranks gather weights and sum gradients together, layer by layer, so that each takes part in every pass. Its gradients
are exactly 0: no token bears loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import BatchRow, Int32Array
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
    return _row(np.zeros(_NUM_TOKENS, np.int32), [_NUM_TOKENS], bears_loss=False)


def probe_row(lengths: Sequence[int], vocabulary: int) -> BatchRow:
    """Samples of random tokens, the same ones each time; all bear loss that can."""
    token_ids = np.random.default_rng(0).integers(0, vocabulary, sum(lengths)).astype(np.int32)
    return _row(token_ids, lengths, bears_loss=True)


def _row(token_ids: Int32Array, lengths: Sequence[int], *, bears_loss: bool) -> BatchRow:
    count = len(token_ids)
    loss_mask = np.full(count, bears_loss)
    loss_mask[np.cumsum(lengths) - lengths] = False
    return BatchRow(
        token_ids=token_ids,
        logprobs=np.zeros(count, np.float32),
        policy_versions=np.full(count, -1, np.int32),
        loss_mask=loss_mask,
        mixed_cache=np.zeros(count, np.bool_),
        advantages=np.zeros(count, np.float32),
        temperatures=np.ones(len(lengths), np.float32),
        sample_lengths=np.array(lengths, np.int32),
    )
