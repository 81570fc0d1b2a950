"""Inputs and outputs of losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tailrace.training.losses.supports import TokenSupports


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The tokens of a micro-batch that bear loss, sample after sample; columns are [num_loss_tokens]."""

    targets: Tensor
    """Token ids, int64."""
    logprobs: Tensor
    """Of the distribution that the generator sampled from, float32."""
    advantages: Tensor
    """float32."""
    temperatures: Tensor
    """Of each token's sample, float32; the policy's log-probabilities are at this temperature too."""
    policy_versions: Tensor
    """That sampled the token, int32."""
    sample_offsets: Tensor
    """[num_samples + 1], int64: tokens of sample i are `sample_offsets[i]` to `sample_offsets[i + 1]`, perhaps none."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """More about the tokens by name, float32 or int32, [num_loss_tokens] or [num_loss_tokens, k]: what scoring or an
    agent set, and what the trainer adds; 0 where nothing was set."""
    whole_lengths: Tensor | None = None
    """[num_samples], int64: tokens of each whole sample that bear the loss of rewards, where some may be cut off here,
    or others are here; None: none are."""
    rewarded: Tensor | None = None
    """[num_loss_tokens], bool: which bear the loss of rewards, the others only components; None: all do."""
    reward_places: Tensor | None = None
    """[num_rewarded], int64: where those are; None where all are, and in a part."""
    reward_offsets: Tensor | None = None
    """[num_samples + 1], int64: the `sample_offsets` of those alone."""
    supports: TokenSupports | None = None
    """What top-p and top-k left for each token; log-probabilities and entropies are over it. None: the vocabulary."""
    reward_supports: TokenSupports | None = None
    """The `supports` of `reward_places` alone."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Where ranks share the row, and have a slice of its tokens each: differentiable sums over them. All of them call
    it together."""

    @property
    def sample_lengths(self) -> Tensor:
        """[num_samples], int64: how many tokens each sample has, those that this part leaves out too."""
        return self.sample_offsets.diff() if self.whole_lengths is None else self.whole_lengths

    @property
    def reward_mask(self) -> Tensor:
        """[num_loss_tokens], bool: which bear the loss of rewards."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self.rewarded is None else self.rewarded

    def part(self, where: slice) -> LossTokens:
        """The tokens of a slice, as views; samples are cut at its ends, and know their whole lengths."""
        return LossTokens(
            self.targets[where],
            self.logprobs[where],
            self.advantages[where],
            self.temperatures[where],
            self.policy_versions[where],
            (self.sample_offsets - where.start).clamp(0, where.stop - where.start),
            {name: column[where] for name, column in self.columns.items()},
            self.sample_lengths,
            None if self.rewarded is None else self.rewarded[where],
            supports=self.supports and self.supports.part(where),
        )

    def of_rewards(self) -> LossTokens:
        """The tokens that bear the loss of rewards, where others do not. Not of a part."""
        if (places := self.reward_places) is None or self.reward_offsets is None:
            return self
        return LossTokens(
            self.targets[places],
            self.logprobs[places],
            self.advantages[places],
            self.temperatures[places],
            self.policy_versions[places],
            self.reward_offsets,
            {name: column[places] for name, column in self.columns.items()},
            self.whole_lengths,
            supports=self.reward_supports,
            sum_over_ranks=self.sum_over_ranks,
        )

    @property
    def is_nothing(self) -> bool:
        """Whether no loss need be asked: there are no tokens here, nor on other ranks that share the row."""
        return not len(self.targets) and self.sum_over_ranks is None

    def sum_by_sample(self, values: Tensor) -> Tensor:
        """[num_samples]: differentiable sums of `values` [num_loss_tokens] over each sample's tokens; 0 over none.

        Of whole samples, where ranks have parts of them; not in a `part`, which knows its own tokens alone.
        """
        offsets = self.sample_offsets
        sums = torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
        return sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)

    def mean_by_sample(self, values: Tensor) -> Tensor:
        """[num_samples]: differentiable means of `values` [num_loss_tokens] over each sample's tokens; 0 over none."""
        return self.sum_by_sample(values) / self.sample_lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[num_loss_tokens]: of `values` [num_samples] to each token that of its sample."""
        lengths = self.sample_offsets.diff()
        return values.repeat_interleave(lengths, output_size=len(self.targets))


class Loss(Protocol):
    """The loss of every token, and which tokens it keeps.

    `logprobs` and `entropy` are the policy's, [num_loss_tokens] and differentiable; both answers are [num_loss_tokens].
    A token that is not kept (False) adds neither loss nor gradient. What their sum is divided by, settings say
    (`Divisor`).
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        """Loss and kept."""
        ...


class PointwiseLoss(ABC):
    """A `Loss` that judges each token by its log-probability alone, and knows the derivative in the forward pass."""

    @abstractmethod
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, derivative by `logprobs`, kept; of any slice of tokens, without gradient."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        """Loss and kept, as of any other loss."""
        loss, derivative, kept = self.with_derivative(logprobs.detach(), tokens)
        moved = (logprobs - logprobs.detach()).nan_to_num()  # 0, too, where a token has become impossible
        largest = torch.finfo(derivative.dtype).max
        return loss + derivative.clamp(-largest, largest) * moved, kept  # 0 times it is 0: a mask may reject the token


@runtime_checkable
class WeightedLoss(Protocol):
    """A loss that weighs tokens by how likely they have become."""

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor | None:
        """[num_loss_tokens]: what it multiplies A ∇log π with where neither clip nor mask stops it. Without gradient.

        None where it has no weights.
        """
        ...


@runtime_checkable
class MeasuredLoss(Protocol):
    """A loss with metrics of its own."""

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """By name, the same ones at each call, [num_loss_tokens]: reported as means over tokens. Without gradient.

        Built-in losses have names of the table of metrics; others than theirs are reported as `own_loss/{name}`.
        """
        ...
