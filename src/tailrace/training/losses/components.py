r"""What is added to the loss of rewards, each with a divisor of its own.

    L = Σ_t ℓ_t / D  +  Σ_c κ_c Σ_t ℓ^c_t / D_c

ℓ is the loss that settings name, 0 where it or a mask rejects the token, and where the token bears none; D is its
`Divisor`. κ_c, ℓ^c and D_c are the coefficient, the loss and the planned tokens of component c. Every D is of the whole
batch, over all rows and ranks. A token that ℓ rejects still counts in components.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import BatchRow, BatchSummary, BoolArray
from tailrace.training.losses.protocol import Loss, LossTokens, PointwiseLoss
from tailrace.training.settings.components import CrossEntropySettings, DistillationSettings, ReferenceKlSettings


class Component(PointwiseLoss):
    """One of them: `with_derivative` is without its coefficient, and not divided by anything."""

    name: ClassVar[str]
    settings: CrossEntropySettings | DistillationSettings | ReferenceKlSettings
    """Of which it is made; their `coefficient` is κ."""

    def planned(self, batch: BatchSummary) -> int:
        """D: how many tokens of the whole batch bear it; those that bear the loss of rewards, unless it says."""
        return batch.loss_tokens

    @abstractmethod
    def measure(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens], of which `training/<name>` is the mean over the tokens that it keeps. Without gradient."""

    def bears(self, row: BatchRow) -> BoolArray | None:
        """[num_tokens of the row]: which tokens bear it, where others may than those that bear the loss of rewards."""
        del row
        return None

    def factor(self, batch: BatchSummary) -> float:
        """κ / D; 0 where no token bears it."""
        planned = self.planned(batch)
        return self.settings.coefficient / planned if planned else 0.0


def add_up(loss: Loss, divisor: float, components: Sequence[Component], batch: BatchSummary) -> Loss:
    """L, whose tokens need not be divided by anything any more. Pointwise where `loss` is; it keeps all tokens."""
    factors = ((component, component.factor(batch)) for component in components)
    scaled = tuple((component, factor) for component, factor in factors if factor)  # 0 times what is infinite is not 0
    if isinstance(loss, PointwiseLoss):
        return _PointwiseSum(loss, divisor, scaled)
    return _Sum(loss, divisor, scaled)


@dataclass(frozen=True, slots=True)
class _Sum:
    loss: Loss
    divisor: float
    components: tuple[tuple[Component, float], ...]

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        total = self._of_rewards(logprobs, entropy, tokens) / self.divisor
        for component, factor in self.components:
            losses, kept = component(logprobs, entropy, tokens)
            total = total + losses.where(kept, 0.0) * factor
        return total, torch.ones_like(total, dtype=torch.bool)

    def _of_rewards(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens]; the loss sees only tokens that bear it."""
        if (places := tokens.reward_places) is None:
            losses, kept = self.loss(logprobs, entropy, tokens)
            return losses.where(kept, 0.0)
        total = torch.zeros_like(logprobs)
        if not len(places) and tokens.sum_over_ranks is None:
            return total
        losses, kept = self.loss(logprobs[places], entropy[places], tokens.of_rewards())
        return total.index_put((places,), losses.where(kept, 0.0))


@dataclass(frozen=True, slots=True)
class _PointwiseSum(PointwiseLoss):
    loss: PointwiseLoss
    divisor: float
    components: tuple[tuple[Component, float], ...]

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        losses, derivatives, kept = self.loss.with_derivative(logprobs, tokens)
        kept = kept if tokens.rewarded is None else kept & tokens.rewarded
        total, slope = losses.where(kept, 0.0) / self.divisor, derivatives.where(kept, 0.0) / self.divisor
        for component, factor in self.components:
            losses, derivatives, kept = component.with_derivative(logprobs, tokens)
            total = total + losses.where(kept, 0.0) * factor
            slope = slope + derivatives.where(kept, 0.0) * factor
        return total, slope, torch.ones_like(total, dtype=torch.bool)
