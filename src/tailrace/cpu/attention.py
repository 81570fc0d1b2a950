"""Softmax attention with the scores of a block of queries at once: on a CPU faster than torch's blockwise kernel.

A block meets only keys up to its own end, which skips most of what causality forbids; queries that share a key head are
stacked. `attend` and `attend_backward` are written out for larger functions with a gradient of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tailrace.cpu.kernels import Kernels

MATERIALIZE_UP_TO = 8192
"""Longest segments that are attended to here; a block of queries would hold too many scores of longer ones, which go
through torch's own blockwise kernel."""

_QUERY_BLOCK = 96
"""Queries whose scores are computed together: smaller blocks skip more of what causality forbids, in more calls."""

_KEEP_UP_TO = 512
_KEEP_BYTES = 16 << 20
"""Probabilities of one group in one layer that are kept at most, and the longest segments whose are; others are
computed twice."""


def materialized_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor | None:
    """Causal attention [segments, heads, length, size], each query over the last `window` keys, itself included.

    With a gradient. `key` and `value` have as many heads, or a divisor of it; the size of `value` may be another one,
    which the output has then. None where torch's kernel is faster.
    """
    if query.shape[2] > MATERIALIZE_UP_TO:
        return None
    return _materialized_attention(query, key, value, scale, window)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, kernels: Kernels | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Attention of scaled queries [segments, heads, length, size], and the probabilities that are worth keeping.

    `key` and `value` have as many heads, or a divisor of it; all are contiguous.
    """
    queries, keys, values = _stacked(query, key, value)
    batch, length, size = values.shape
    output = queries.new_empty(*queries.shape[:3], size)
    blocks = _blocks(length)
    scores = batch * queries.shape[1] * sum((end - start) * end for start, end in blocks)
    keeps = length <= _KEEP_UP_TO and scores * queries.element_size() <= _KEEP_BYTES
    kept = []
    for start, end in blocks:
        block = queries[:, :, start:end].flatten(1, 2)
        probabilities = _probabilities(block, keys[:, :end], start, window, kernels)
        output[:, :, start:end] = torch.bmm(probabilities, values[:, :end]).view(batch, -1, end - start, size)
        if keeps:
            kept.append(probabilities)
    return output.view(*query.shape[:3], size), kept


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
    grad = grad_output.reshape(*queries.shape[:3], values.shape[2])
    grad_query = torch.empty_like(queries)
    # In float32, since many blocks add to each of them.
    grad_keys, grad_values = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (keys, values))
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
    grad_key, grad_value = grad_keys.to(key.dtype).view(key.shape), grad_values.to(value.dtype).view(value.shape)
    return grad_query.view(query.shape), grad_key, grad_value


class _MaterializedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        query, key, value = (query * scale).contiguous(), key.contiguous(), value.contiguous()
        output, kept = attend(query, key, value, window=window)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.scale, ctx.window = scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        grad_query, grad_key, grad_value = attend_backward((query, key, value), kept, grads[0], window=ctx.window)
        return grad_query.mul_(ctx.scale), grad_key, grad_value, None, None


def _stacked(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, queries per key head, length, size] and twice [batch, length, size]; batch is segments * key heads."""
    return torch.unflatten(query, 1, (key.shape[1], -1)).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


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
    queries, positions = torch.arange(start, length)[:, None], torch.arange(length)
    forbidden = positions > queries
    if window is not None:
        forbidden |= positions <= queries - window
    bias = torch.zeros(forbidden.shape, dtype=scores.dtype).masked_fill_(forbidden, float("-inf"))
    return torch.softmax(scores.add_(bias.repeat(block.shape[1] // len(queries), 1)), dim=-1)


_materialized_attention: Callable[..., Tensor] = _MaterializedAttention.apply
