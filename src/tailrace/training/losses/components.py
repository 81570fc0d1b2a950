r"""What is added to the loss of rewards, each with a divisor of its own.

    L = Σ_t ℓ_t / D  +  Σ_c κ_c Σ_t ℓ^c_t / D_c

ℓ is the loss that settings name, 0 where it or a mask rejects the token, D its `Divisor`; κ_c, ℓ^c and D_c are the
coefficient, the loss and the planned tokens of component c. Every D is of the whole batch, over all rows and ranks. A
token that ℓ rejects still counts in components.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import BatchSummary
from tailrace.training.losses.protocol import Loss, LossTokens, PointwiseLoss


class Component(PointwiseLoss):
    """One of them: `with_derivative` is without its coefficient, and not divided by anything."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def coefficient(self) -> float:
        """κ."""

    @abstractmethod
    def planned(self, batch: BatchSummary) -> int:
        """D: how many tokens of the whole batch bear it."""

    @abstractmethod
    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """As of a `MeasuredLoss`."""

    def factor(self, batch: BatchSummary) -> float:
        """κ / D; 0 where no token bears it."""
        planned = self.planned(batch)
        return self.coefficient / planned if planned else 0.0


def add_up(loss: Loss, divisor: float, components: Sequence[Component], batch: BatchSummary) -> Loss:
    """L, whose tokens need not be divided by anything any more. Pointwise where `loss` is; it keeps all tokens."""
    scaled = tuple((component, component.factor(batch)) for component in components)
    if isinstance(loss, PointwiseLoss):
        return _PointwiseSum(loss, divisor, scaled)
    return _Sum(loss, divisor, scaled)


@dataclass(frozen=True, slots=True)
class _Sum:
    loss: Loss
    divisor: float
    components: tuple[tuple[Component, float], ...]

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        losses, kept = self.loss(logprobs, entropy, tokens)
        total = losses.where(kept, 0.0) / self.divisor
        for component, factor in self.components:
            losses, kept = component(logprobs, entropy, tokens)
            total = total + losses.where(kept, 0.0) * factor
        return total, torch.ones_like(total, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class _PointwiseSum(PointwiseLoss):
    loss: PointwiseLoss
    divisor: float
    components: tuple[tuple[Component, float], ...]

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        losses, derivatives, kept = self.loss.with_derivative(logprobs, tokens)
        total, slope = losses.where(kept, 0.0) / self.divisor, derivatives.where(kept, 0.0) / self.divisor
        for component, factor in self.components:
            losses, derivatives, kept = component.with_derivative(logprobs, tokens)
            total = total + losses.where(kept, 0.0) * factor
            slope = slope + derivatives.where(kept, 0.0) * factor
        return total, slope, torch.ones_like(total, dtype=torch.bool)
