"""Softmax attention with the scores of a block of queries at once: on CPU faster than torch's kernel when short.

A block of queries meets only keys up to its own end, so most of what causality forbids is never computed. Queries
that share a key head are stacked, so that keys and values are never repeated. `attend` and `attend_backward` are
written out, for autograd (`materialized_attention`) and for larger functions with a gradient of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tailrace.generation.engines.native import Kernels

MATERIALIZE_UP_TO = 512
"""Longest segments whose scores are held at once; longer ones go through torch's blockwise kernel."""

_QUERY_BLOCK = 96
"""Queries whose scores are computed together: smaller blocks skip more of what causality forbids, in more calls."""

_KEEP_BYTES = 16 << 20
"""Probabilities of one group in one layer that are kept at most; more are computed twice."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a query sees besides its own segment's past: nothing, with these two numbers."""

    scale: float
    window: int | None
    """Tokens that a query sees at most, itself included; None is all."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, kernels: Kernels | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Attention of scaled queries [segments, heads, length, size], and the probabilities that are worth keeping.

    `key` and `value` have as many heads, or a divisor of it; all are contiguous.
    """
    queries, keys, values = _stacked(query, key, value)
    batch, length, size = keys.shape
    output = torch.empty_like(queries)
    kept = []
    for start, end in _blocks(length):
        block = queries[:, :, start:end].flatten(1, 2)
        probabilities = _probabilities(block, keys[:, :end], start, window, kernels)
        output[:, :, start:end] = torch.bmm(probabilities, values[:, :end]).view(batch, -1, end - start, size)
        kept.append(probabilities)
    worth_keeping = sum(probabilities.nbytes for probabilities in kept) <= _KEEP_BYTES
    return output.view(query.shape), kept if worth_keeping else []


def attend_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    kept: list[Tensor],
    grad_output: Tensor,
    *,
    window: int | None,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `inputs`: scaled queries, keys and values."""
    query, key, value = inputs
    queries, keys, values = _stacked(query, key, value)
    grad = grad_output.reshape(queries.shape)
    grad_query, grad_keys, grad_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for index, (start, end) in enumerate(_blocks(queries.shape[2])):
        block, grad_block = (tensor[:, :, start:end].flatten(1, 2) for tensor in (queries, grad))
        own_keys = keys[:, :end]
        probabilities = kept[index] if kept else _probabilities(block, own_keys, start, window, kernels)
        grad_values[:, :end] += torch.bmm(probabilities.mT, grad_block)
        grad_probabilities = torch.bmm(grad_block, values[:, :end].mT)
        if kernels is not None and window is None:
            grad_scores = kernels.causal_softmax_backward(
                probabilities, grad_probabilities, block=end - start, start=start
            )
        else:
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
        grad_keys[:, :end] += torch.bmm(grad_scores.mT, block)
        part = grad_query[:, :, start:end]
        part.copy_(torch.bmm(grad_scores, own_keys).view(part.shape))
    return grad_query.view(query.shape), grad_keys.view(key.shape), grad_values.view(value.shape)


def causal_bias(length: int, window: int | None, like: Tensor) -> Tensor:
    """[length, length]: 0 where a query may look, -inf elsewhere."""
    forbidden = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    if window is not None and length > window:
        forbidden |= torch.ones_like(forbidden).tril(-window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(forbidden, float("-inf"))


class _MaterializedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        query, key, value = (query * rule.scale).contiguous(), key.contiguous(), value.contiguous()
        output, kept = attend(query, key, value, window=rule.window)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.rule = rule
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        grad_query, grad_key, grad_value = attend_backward((query, key, value), kept, grads[0], window=ctx.rule.window)
        return grad_query.mul_(ctx.rule.scale), grad_key, grad_value, None


def _stacked(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, queries per key head, length, size] and twice [batch, length, size]; batch is segments * key heads."""
    segments, heads, length, size = query.shape
    batch = segments * key.shape[1]
    return (
        query.view(batch, heads // key.shape[1], length, size),
        key.view(batch, length, size),
        value.view(batch, length, size),
    )


def _blocks(length: int) -> list[tuple[int, int]]:
    """Query blocks of nearly equal size, about `_QUERY_BLOCK` each."""
    count = max(1, round(length / _QUERY_BLOCK))
    edges = [length * index // count for index in range(count + 1)]
    return list(pairwise(edges))


def _probabilities(block: Tensor, keys: Tensor, start: int, window: int | None, kernels: Kernels | None) -> Tensor:
    """[batch, queries per key head * block, keys] of scaled queries, the first of which stands at `start`."""
    length = keys.shape[1]
    scores = torch.bmm(block, keys.mT)
    if kernels is not None and window is None:
        return kernels.causal_softmax(scores, block=length - start, start=start)
    bias = causal_bias(length, window, block)[start:].repeat(block.shape[1] // (length - start), 1)
    return torch.softmax(scores.add_(bias), dim=-1)


materialized_attention: Callable[[Tensor, Tensor, Tensor, Rule], Tensor] = _MaterializedAttention.apply
