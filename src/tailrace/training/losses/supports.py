"""What the tokens of a micro-batch were sampled from, where top-p or top-k left less than the whole vocabulary.

With S the tokens that sampling kept and z the logits at the sample's temperature, the policy's probabilities are those
of the generator's distribution over the same S, whatever the present weights would keep:

    log π(y) = z_y - log Σ_{i ∈ S} e^{z_i},      H = -Σ_{i ∈ S} π(i) log π(i)

No gradient reaches the logits outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OUTSIDE = -1e30
"""In the place of logits that do not count: finite, so that 0 times it is 0, and e to it is exactly 0."""


@dataclass(frozen=True, slots=True)
class TokenSupports:
    """A ragged column of token ids, as in `records.Supports`."""

    token_ids: Tensor
    """[sum of counts], int32."""
    counts: Tensor
    """[num_loss_tokens], int32; 0: the whole vocabulary."""
    offsets: NDArray[np.int64]
    """[num_loss_tokens + 1], into the ids; on the host, so that parts are found without waiting for a device."""

    def part(self, where: slice) -> TokenSupports:
        """Those of the tokens of a slice, as views."""
        offsets = self.offsets[where.start : where.stop + 1]
        ids = self.token_ids[int(offsets[0]) : int(offsets[-1])]
        return TokenSupports(ids, self.counts[where], offsets - offsets[0])

    def outside(self, vocabulary: int) -> Tensor:
        """[num_loss_tokens, vocabulary], True for what could not be sampled."""
        counts, num_ids = self.counts, int(self.offsets[-1] - self.offsets[0])
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_ids)
        outside = (counts > 0)[:, None].repeat(1, vocabulary)
        outside[rows, self.token_ids.long()] = False
        return outside
