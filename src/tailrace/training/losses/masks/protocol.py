"""What rejects tokens before a loss does."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from tailrace.training.losses.protocol import LossTokens


class Mask(ABC):
    """Says which tokens are kept, by the policy's log-probabilities of a whole micro-batch."""

    @abstractmethod
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens], bool; of [num_loss_tokens] without gradient."""


class PointwiseMask(Mask):
    """A mask that judges each token by itself, so that it works on any slice of tokens."""
