"""From hidden states to loss and gradients, without ever holding the logits of a whole row.

The loss of a token depends on its logits through one number, its log-probability, and the derivative by that number is
known as soon as it is. So one pass over chunks of tokens computes logits, log-probabilities, loss and the gradients of
hidden states and head at once, and drops the logits again: memory is chunk × vocabulary, where autograd alone would
keep several copies of tokens × vocabulary.

    d loss_t / d logits_t = d loss_t / d logprob_t · (onehot(y_t) - softmax(logits_t / T)) / T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

PointwiseLoss: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""From log-probabilities of the tokens in a slice to their loss and its derivative, both [num_tokens in the slice]."""

_CHUNK_ELEMENTS = 1 << 20
"""Logits per chunk: 4 MB in float32, so that the passes over a chunk stay in cache."""


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """What the head's output is measured by; tensors are [num_loss_tokens]."""

    targets: Tensor
    """Token ids, int64."""
    inverse_temperatures: Tensor
    """Logits are multiplied by it."""
    pointwise: PointwiseLoss


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Per-token results, float32 and [num_loss_tokens], without gradient; `loss` alone carries it."""

    loss: Tensor
    """Scalar; its backward reaches hidden states and head."""
    token_losses: Tensor
    logprobs: Tensor
    entropy: Tensor


def loss_from_hidden_states(hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: HeadLoss) -> HeadOutput:
    """Loss of `hidden` [num_loss_tokens, hidden_size] under the head `weight` [vocabulary, hidden_size].

    Logits are computed in `weight`'s dtype and reduced in float32.
    """
    return HeadOutput(*_fused_head(hidden, weight, bias, loss))


def loss_from_logits(logits: Tensor, loss: HeadLoss) -> HeadOutput:
    """The same for heads that are more than one matrix (soft-capped or scaled logits); holds [tokens, vocabulary]."""
    scaled = torch.log_softmax(logits.float() * loss.inverse_temperatures[:, None], dim=-1)
    logprobs = scaled.gather(1, loss.targets[:, None]).squeeze(1)
    with torch.no_grad():
        losses, derivative = loss.pointwise(logprobs.detach(), slice(0, len(logprobs)))
        entropy = -(scaled.exp() * scaled).sum(-1)
    slope = (logprobs * derivative).sum()  # its gradient is the derivative; its value is taken off again
    return HeadOutput(losses.sum() + slope - slope.detach(), losses, logprobs.detach(), entropy)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: HeadLoss) -> tuple[Tensor, ...]:
        head_input = hidden.detach().to(weight.dtype)
        grads = _HeadGradients(head_input, weight, bias)
        num_tokens = len(loss.targets)
        losses, logprobs, entropy = (hidden.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        chunk = max(16, _CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, num_tokens, chunk):
            where = slice(start, min(start + chunk, num_tokens))
            scale, targets = loss.inverse_temperatures[where, None], loss.targets[where, None]
            logits = _logits(head_input[where], weight, bias).mul_(scale)
            logprobs[where], entropy[where], probabilities = _normalise(logits, targets)
            losses[where], derivative = loss.pointwise(logprobs[where], where)
            grads.add(where, probabilities, targets, derivative[:, None] * scale)
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(losses, logprobs, entropy)
        return losses.sum(), losses, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scale = grads[0]
        return (
            (hidden * scale).to(ctx.hidden_dtype),
            weight * scale.to(weight.dtype),
            None if bias is None else bias * scale,
            None,
        )


class _HeadGradients:
    """Gradients of the head's input and weights, grown chunk by chunk."""

    def __init__(self, head_input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._input, self._weight = head_input, weight.detach()
        self.hidden = torch.empty_like(head_input)
        self.weight = torch.zeros_like(self._weight)
        self.bias = None if bias is None else torch.zeros_like(bias)

    def add(self, where: slice, probabilities: Tensor, targets: Tensor, derivative: Tensor) -> None:
        """`probabilities` [chunk, vocabulary] are overwritten; `targets` and `derivative` are [chunk, 1]."""
        gradient = probabilities.mul_(-derivative)
        gradient.scatter_add_(1, targets, derivative.to(gradient.dtype))
        gradient = gradient.to(self._weight.dtype)
        torch.mm(gradient, self._weight, out=self.hidden[where])
        self.weight.addmm_(gradient.t(), self._input[where])
        if self.bias is not None:
            self.bias += gradient.sum(0)


def _logits(head_input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[chunk, vocabulary] in float32."""
    logits = head_input @ weight.detach().t()
    if bias is not None:
        logits += bias.detach()
    return logits.float()


def _normalise(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, [chunk], and probabilities, [chunk, vocabulary]."""
    chosen = logits.gather(1, targets).squeeze(1)
    normaliser = torch.logsumexp(logits, dim=1)
    probabilities = torch.softmax(logits, dim=1)
    entropy = normaliser - torch.linalg.vecdot(probabilities, logits)
    return chosen - normaliser, entropy, probabilities


_fused_head: Callable[[Tensor, Tensor, Tensor | None, HeadLoss], tuple[Tensor, ...]] = _FusedHead.apply
