"""Looks at what a loss of users' own answers: one number in place of a loss for each token would train, and wrongly.

What it raises is told with its name, and the line of its code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.errors import TailraceError, TrainingError
from tailrace.training.losses.protocol import Loss, LossTokens, MeasuredLoss, PointwiseLoss, WeightedLoss
from tailrace.user_code import describe_failure

_CLIPPED, _REJECTED = "training/clip_share", "training/rejected_share/"
"""Metrics of built-in losses that one's own may have as well."""
_PAIR = ("loss", "kept")
_TRIPLE = ("loss", "derivative", "kept")
_WEIGHTS = ("importance_weights",)


def checked(loss: Loss, name: str) -> Loss:
    """`loss`, which `trainer.loss.name` calls `name`; pointwise where it is.

    Raises `TrainingError` when it is called and raises, or answers anything but [num_loss_tokens] each, bools for what
    is kept, or for tokens that it keeps a loss that has no gradient and is not 0.
    """
    return _CheckedPointwise(loss, name) if isinstance(loss, PointwiseLoss) else _Checked(loss, name)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What both kinds report: nothing, where the loss does not."""

    loss: Loss
    name: str

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Those of the loss, in the order of their names, none of which is another metric's."""
        if not isinstance(self.loss, MeasuredLoss):
            return {}
        with _told(self.name):
            metrics = {str(name): values for name, values in self.loss.token_metrics(logprobs, tokens).items()}
        _require(tuple(metrics.values()), tuple(metrics), logprobs, self.name)
        return {_named_apart(name): metrics[name] for name in sorted(metrics)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor | None:
        """Those of the loss."""
        if not isinstance(self.loss, WeightedLoss):
            return None
        with _told(self.name):
            weights = self.loss.importance_weights(logprobs, tokens)
        return None if weights is None else _require((weights,), _WEIGHTS, logprobs, self.name)[0]


@dataclass(frozen=True, slots=True)
class _Checked(_Measured):
    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens, /) -> tuple[Tensor, Tensor]:
        with _told(self.name):
            answer = self.loss(logprobs, entropy, tokens)
        losses, kept = _require(answer, _PAIR, logprobs, self.name)
        if not losses.requires_grad and logprobs.requires_grad and torch.is_grad_enabled():
            if losses[kept].any():
                raise TrainingError(
                    f"trainer.loss.name is {self.name!r}: the loss of tokens that it keeps depends on neither logprobs "
                    "nor entropy, and would teach nothing: take it from them as they are given, not detached, or keep "
                    "none of these tokens"
                )
            losses = logprobs.masked_fill(torch.ones_like(kept), 0)  # of none, or 0: one whose gradient is 0
        return losses, kept


@dataclass(frozen=True, slots=True)
class _CheckedPointwise(_Measured, PointwiseLoss):
    loss: PointwiseLoss

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        with _told(self.name):
            answer = self.loss.with_derivative(logprobs, tokens)
        losses, derivatives, kept = _require(answer, _TRIPLE, logprobs, self.name)
        return losses, derivatives, kept


def _named_apart(name: str) -> str:
    """What a figure of a loss of one's own is reported as.

    >>> _named_apart("training/clip_share"), _named_apart("training/rejected_share/far_off")
    ('training/clip_share', 'training/rejected_share/far_off')
    >>> _named_apart("rejected"), _named_apart("training/kl")
    ('own_loss/rejected', 'own_loss/kl')
    """
    if name == _CLIPPED or name.startswith(_REJECTED):
        return name
    return f"own_loss/{name.removeprefix('training/')}"


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What the code inside raises is told as that of the loss called `name`."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:
        raise TrainingError(f"trainer.loss.name is {name!r}: it raised {describe_failure(error)}") from error


def _require(answer: object, parts: tuple[str, ...], logprobs: Tensor, name: str) -> tuple[Tensor, ...]:
    """`answer`, if it is one tensor for each of `parts`, of the shape of `logprobs`."""
    wanted = f"({', '.join(parts)}), each a tensor [num_loss_tokens], here {list(logprobs.shape)}"
    bools = ", and kept of bools" if "kept" in parts else ""
    what = f"trainer.loss.name is {name!r}: it must answer {wanted}{bools}; "
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
