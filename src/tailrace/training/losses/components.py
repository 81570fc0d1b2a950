r"""What is added to the loss of rewards, each with a divisor of its own.

    L = Σ_t ℓ_t / D  +  Σ_c κ_c Σ_t w^c_t ℓ^c_t / D_c

ℓ is the loss that settings name, 0 where it or a mask rejects the token, and where the token bears none; D is its
`Divisor`. κ_c, w^c, ℓ^c and D_c are the coefficient, the weights, the loss and the planned tokens of component c: those
that bear it and whose weight is not 0. Every D is of the whole batch, over all rows and ranks. A token that ℓ rejects
still counts in components.

Most components judge a token by its log-probability; one may judge it by those of k candidates in its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import BatchRow, BatchSummary, BoolArray
from tailrace.training.losses.protocol import Loss, LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import weighted
from tailrace.training.settings.components import CrossEntropySettings, DistillationSettings, ReferenceKlSettings


class Component(ABC):
    """One of them: a `TokenComponent` or a `CandidateComponent`."""

    name: ClassVar[str]
    settings: CrossEntropySettings | DistillationSettings | ReferenceKlSettings
    """Of which it is made; their `coefficient` is κ."""

    def planned(self, batch: BatchSummary) -> int:
        """D: how many tokens of the whole batch bear it; those that bear the loss of rewards and have a weight, unless
        it says."""
        return batch.weighted_tokens(f"{self.name}_weights")

    def weights(self, tokens: LossTokens) -> Tensor | None:
        """[num_loss_tokens]: w, in the column that is named after it; None: 1 throughout."""
        return tokens.columns.get(f"{self.name}_weights")

    def weighs(self, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens], bool: which of those that bear the loss of rewards have a weight, and so bear it."""
        weights = self.weights(tokens)
        return tokens.reward_mask if weights is None else tokens.reward_mask & (weights != 0)

    def bears(self, row: BatchRow) -> BoolArray | None:
        """[num_tokens of the row]: which tokens bear it, where others may than those that bear the loss of rewards."""
        del row
        return None

    def factor(self, batch: BatchSummary) -> float:
        """κ / D; 0 where no token bears it."""
        planned = self.planned(batch)
        return self.settings.coefficient / planned if planned else 0.0


class TokenComponent(Component, PointwiseLoss):
    """Of the sampled token: `with_derivative` is without its coefficient, and not divided by anything."""

    @abstractmethod
    def of_token(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """ℓ^c without its weight, and the derivative by `logprobs`; both [num_loss_tokens], without gradient."""

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Each times its weight; a token without one bears nothing, whatever it is."""
        loss, derivative = self.of_token(logprobs, tokens)
        if (weights := self.weights(tokens)) is not None:
            weights = weights.to(logprobs.dtype)
            loss, derivative = weighted(weights, loss), weighted(weights, derivative)
        return loss, derivative, self.weighs(tokens)

    @abstractmethod
    def measure(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens], of which `training/<name>` is the mean over the tokens that it keeps. Without gradient."""


class CandidateComponent(Component):
    """Of what the policy gives to k candidates where a token was sampled, whichever of them was.

    No loss by itself. `with_derivatives` is as bare as a `TokenComponent`'s, and without its weights;
    `training/<name>` is its mean.
    """

    @abstractmethod
    def candidates(self, tokens: LossTokens) -> Tensor:
        """[num_loss_tokens, k], int64: token ids, those of one token all different; below 0 there is none."""

    @abstractmethod
    def with_derivatives(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """Loss, [num_loss_tokens], and its derivatives by `logprobs`, those of the candidates, [num_loss_tokens, k].

        Of any slice of tokens, without gradient; both 0 for tokens that do not bear it, the latter where there is no
        candidate, for which `logprobs` has any number.
        """


@dataclass(frozen=True, slots=True)
class ScaledCandidates:
    """A loss of candidates with what it is multiplied by beside its weights: coefficient and divisor together."""

    loss: CandidateComponent
    factor: float


def candidates_of(loss: Loss) -> ScaledCandidates | None:
    """What a loss that components were added to says of candidates; the head adds that."""
    return loss.candidates if isinstance(loss, _Sum | _PointwiseSum) else None


def add_up(loss: Loss, divisor: float, components: Sequence[Component], batch: BatchSummary) -> Loss:
    """L, whose tokens need not be divided by anything any more. Pointwise where `loss` is; it keeps all tokens.

    Of `components` one at most judges candidates.
    """
    factors = [(component, component.factor(batch)) for component in components]
    borne = [(component, factor) for component, factor in factors if factor]  # 0 times what is infinite is not 0
    of_tokens = tuple((one, factor) for one, factor in borne if isinstance(one, TokenComponent))
    of_candidates = [ScaledCandidates(one, factor) for one, factor in borne if isinstance(one, CandidateComponent)]
    candidates = of_candidates[0] if of_candidates else None
    if isinstance(loss, PointwiseLoss):
        return _PointwiseSum(loss, divisor, of_tokens, candidates)
    return _Sum(loss, divisor, of_tokens, candidates)


@dataclass(frozen=True, slots=True)
class _Sum:
    loss: Loss
    divisor: float
    components: tuple[tuple[TokenComponent, float], ...]
    candidates: ScaledCandidates | None = None

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
    components: tuple[tuple[TokenComponent, float], ...]
    candidates: ScaledCandidates | None = None

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
