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

    def restrict(self, logits: Tensor) -> None:
        """Replace those of `logits` [num_loss_tokens, vocabulary] that could not be sampled. Differentiable."""
        rows = torch.arange(len(self.counts), device=logits.device)
        places = rows.repeat_interleave(self.counts, output_size=len(self.token_ids)), self.token_ids.long()
        kept = logits[places]
        if np.diff(self.offsets).all():  # all but always, and several times as fast
            logits.fill_(OUTSIDE)
        else:
            logits.masked_fill_((self.counts > 0)[:, None], OUTSIDE)
        logits[places] = kept
