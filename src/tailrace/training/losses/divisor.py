"""What the sum of a batch's losses is divided by."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.records import BatchSummary
from tailrace.training.settings.losses import (
    CrossEntropyLossSettings,
    Denominator,
    DrGrpoSettings,
    LossSettings,
    OwnLossSettings,
)


@dataclass(frozen=True, slots=True)
class Divisor:
    """One figure for a whole batch, over all of its rows and ranks: how samples lie in rows changes no gradient.

    Gradients are divided by the planned figure while they accumulate. Where rejected tokens count, that figure is
    known only afterwards: then they are multiplied, once, by planned over final.
    """

    denominator: Denominator
    length: int = 1
    """Of `SEQUENCES_TIMES_LENGTH`."""
    is_known: bool = True
    """Whether the planned figure is the final one, whatever the loss says of the tokens."""

    @classmethod
    def of_loss(cls, settings: LossSettings) -> Divisor:
        """That of the loss."""
        denominator = Denominator(settings.denominator)
        may_reject = bool(settings.masks) or isinstance(settings, OwnLossSettings | CrossEntropyLossSettings)
        return cls(
            denominator,
            settings.length if isinstance(settings, DrGrpoSettings) else 1,
            is_known=denominator != Denominator.KEPT_TOKENS or not may_reject,
        )

    def planned(self, batch: BatchSummary) -> int:
        """Before any loss is computed."""
        return self.final(batch, batch.loss_tokens)

    def final(self, batch: BatchSummary, kept_tokens: int) -> int:
        """Once it is known how many of the batch's loss tokens the loss keeps."""
        return self.of(batch.loss_tokens, kept_tokens, batch.num_sequences)

    def of(self, planned_tokens: int, kept_tokens: int, sequences: int) -> int:
        """Of any part of a batch that has so many."""
        match self.denominator:
            case Denominator.PLANNED_TOKENS:
                return planned_tokens
            case Denominator.KEPT_TOKENS:
                return kept_tokens
            case Denominator.SEQUENCES:
                return sequences
            case Denominator.SEQUENCES_TIMES_LENGTH:
                return sequences * self.length
