"""Looks at what a loss of users' own answers: one number in place of a loss for each token would train, and wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.errors import TrainingError
from tailrace.training.losses.protocol import Loss, LossTokens, MeasuredLoss, PointwiseLoss, WeightedLoss

_PAIR = ("loss", "kept")
_TRIPLE = ("loss", "derivative", "kept")


def checked(loss: Loss, name: str) -> Loss:
    """`loss`, which `trainer.loss.name` calls `name`; pointwise where it is.

    Raises `TrainingError` when it is called and answers anything but [num_loss_tokens] each, bools for what is kept.
    """
    return _CheckedPointwise(loss, name) if isinstance(loss, PointwiseLoss) else _Checked(loss, name)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What both kinds report: nothing, where the loss does not."""

    loss: Loss
    name: str

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Those of the loss."""
        return self.loss.token_metrics(logprobs, tokens) if isinstance(self.loss, MeasuredLoss) else {}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor | None:
        """Those of the loss."""
        return self.loss.importance_weights(logprobs, tokens) if isinstance(self.loss, WeightedLoss) else None


@dataclass(frozen=True, slots=True)
class _Checked(_Measured):
    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        losses, kept = _require(self.loss(logprobs, entropy, tokens), _PAIR, logprobs, self.name)
        return losses, kept


@dataclass(frozen=True, slots=True)
class _CheckedPointwise(_Measured, PointwiseLoss):
    loss: PointwiseLoss

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        answer = self.loss.with_derivative(logprobs, tokens)
        losses, derivatives, kept = _require(answer, _TRIPLE, logprobs, self.name)
        return losses, derivatives, kept


def _require(answer: object, parts: tuple[str, ...], logprobs: Tensor, name: str) -> tuple[Tensor, ...]:
    """`answer`, if it is one tensor for each of `parts`, of the shape of `logprobs`."""
    wanted = f"({', '.join(parts)}), each a tensor [num_loss_tokens], here {list(logprobs.shape)}, and kept of bools"
    what = f"trainer.loss.name is {name!r}: it must answer {wanted}; "
    if not isinstance(answer, tuple | list) or len(answer) != len(parts):
        raise TrainingError(f"{what}it answered {_described(answer)}")
    for part, value in zip(parts, answer, strict=True):
        is_right = isinstance(value, Tensor) and value.shape == logprobs.shape
        if not is_right or (part == "kept" and value.dtype != torch.bool):
            raise TrainingError(f"{what}its {part} is {_described(value)}")
    return tuple(answer)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    counted = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{counted}"
