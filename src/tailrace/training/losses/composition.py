"""A loss together with what settings add to it: masks, a bonus for entropy, the mean over each sequence.

    L_t = w_t (ℓ_t - c H_t) for tokens that every mask and the loss keep, else 0
    w_t = 1/|o| of the token's sequence where the mean over sequences is asked for, else 1

(The bonus is that of Williams and Peng 1991, "Function Optimization Using Connectionist Reinforcement Learning
Algorithms".) A pointwise loss with pointwise masks and no bonus stays pointwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.masks import Mask, PointwiseMask
from tailrace.training.losses.protocol import Loss, LossTokens, MeasuredLoss, PointwiseLoss, WeightedLoss


def compose(loss: Loss, masks: Mapping[str, Mask], *, entropy: float = 0.0, per_sequence: bool = False) -> Loss:
    """`loss` with `masks`, by the names that what they reject is counted under, and with `entropy` as c."""
    if not masks and not entropy and not per_sequence:
        return loss
    by_token = all(isinstance(mask, PointwiseMask) for mask in masks.values())
    if isinstance(loss, PointwiseLoss) and by_token and not entropy:
        return _PointwiseComposition(loss, masks, per_sequence)
    return _Composition(loss, masks, per_sequence, entropy)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What both kinds report."""

    loss: Loss
    masks: Mapping[str, Mask]
    per_sequence: bool

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Those of the loss, and what each mask rejects; what two reject counts for both."""
        metrics = dict(self.loss.token_metrics(logprobs, tokens)) if isinstance(self.loss, MeasuredLoss) else {}
        for name, mask in self.masks.items():
            metrics[f"training/rejected_share/{name}"] = ~mask.keeps(logprobs, tokens)
        return metrics

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor | None:
        """Those of the loss."""
        return self.loss.importance_weights(logprobs, tokens) if isinstance(self.loss, WeightedLoss) else None

    def _keeps(self, kept: Tensor, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        for mask in self.masks.values():
            kept = kept & mask.keeps(logprobs, tokens)
        return kept

    def _weights(self, like: Tensor, tokens: LossTokens) -> Tensor | float:
        return tokens.spread(tokens.sample_lengths.to(like.dtype).reciprocal()) if self.per_sequence else 1.0


@dataclass(frozen=True, slots=True)
class _PointwiseComposition(_Measured, PointwiseLoss):
    loss: PointwiseLoss

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        losses, derivatives, kept = self.loss.with_derivative(logprobs, tokens)
        weights = self._weights(losses, tokens)
        return losses * weights, derivatives * weights, self._keeps(kept, logprobs, tokens)


@dataclass(frozen=True, slots=True)
class _Composition(_Measured):
    entropy: float

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        losses, kept = self.loss(logprobs, entropy, tokens)
        losses = (losses - self.entropy * entropy) * self._weights(losses, tokens)
        return losses, self._keeps(kept, logprobs.detach(), tokens)
