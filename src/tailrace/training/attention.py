"""Attention over packed rows: every segment attends to itself alone, and no mask of row length squared exists.

A row is [1, num_tokens]: samples side by side. `PackedAttention` registers with transformers' attention interface, so
that a model's own code runs unchanged and hands over queries, keys and values of the whole row:

    [1, heads, num_tokens, head_size] ──gather──► [segments, heads, max_len, head_size] per group of similar lengths
                                      ◄─scatter── causal attention; what was padded is never read back

On CPU one call over a padded group is several times faster than a call per segment. Padding lies to the right, where
causal attention cannot see it, so no mask is needed either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.errors import ModelError
from tailrace.training.shared_prefixes import SharedPrefixes

PACKED_ATTENTION = "tailrace_packed"
"""Name of this attention in transformers' interface (`model.set_attn_implementation`)."""

MIN_FILL = 0.8
"""Shortest segment of a group, relative to its longest: attention's cost grows with the square of the padded length."""

_ALWAYS_TOGETHER = 32
"""Segments up to this many tokens share a group whatever their lengths: calls cost more than padding."""

_MATERIALIZE_UP_TO = 512
"""Longest segments whose scores are held at once; longer ones go through torch's blockwise kernel."""

_QUERY_BLOCK = 96
"""Queries whose scores are computed together: smaller blocks skip more of what causality forbids, in more calls."""

_KEEP_BYTES = 16 << 20
"""Probabilities of one group in one layer that are kept at most; more are computed twice."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "dropout", "attention_mask")


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments of similar length, padded to the longest."""

    num_segments: int
    max_len: int
    gather: Tensor
    """[num_segments * max_len]: position in the row; padding repeats a segment's last token."""
    scatter: Tensor
    """[tokens of the group]: where each token that is the group's own lies in the padded group."""
    positions: Tensor
    """[tokens of the group]: where each of them lies in the row."""
    borrowed_scatter: Tensor
    """[borrowed tokens]: where each token that other segments computed lies in the padded group."""
    borrowed_positions: Tensor
    """[borrowed tokens]: where each of them lies in the row."""


@dataclass(frozen=True, slots=True)
class Segments:
    """How a row is divided. Built once per row, shared by all layers."""

    lengths: tuple[int, ...]
    groups: tuple[SegmentGroup, ...]
    position_ids: Tensor
    """[1, num_tokens], from 0 in every segment; of tokens in the row, so that a borrowed beginning is left out."""
    offsets: Tensor
    """[num_segments + 1], int32."""
    restore: Tensor
    """[num_tokens]: where each token of the row lies among the groups' real tokens, one group after the other."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", shared: SharedPrefixes | None = None
    ) -> Segments:
        """Divide a row into segments of these lengths, each 1 or more; with `shared`, the row holds computed tokens."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + int(length))
        position_ids = torch.cat([torch.arange(int(length)) for length in lengths])
        computed = torch.ones(starts[-1], dtype=torch.bool) if shared is None else torch.from_numpy(shared.computed)
        place = torch.arange(starts[-1]) if shared is None else torch.from_numpy(shared.place)
        groups = tuple(_group(members, lengths, starts, computed, place) for members in _by_length(lengths))
        order = torch.cat([group.positions for group in groups])
        segments = cls(
            lengths=tuple(int(length) for length in lengths),
            groups=groups,
            position_ids=position_ids[computed][None],
            offsets=torch.tensor(starts, dtype=torch.int32),
            restore=torch.empty_like(order).scatter_(0, order, torch.arange(len(order))),
        )
        return segments if torch.device(device).type == "cpu" else segments._to(torch.device(device))

    def _to(self, device: torch.device) -> Segments:
        groups = tuple(
            SegmentGroup(
                group.num_segments,
                group.max_len,
                group.gather.to(device),
                group.scatter.to(device),
                group.positions.to(device),
                group.borrowed_scatter.to(device),
                group.borrowed_positions.to(device),
            )
            for group in self.groups
        )
        return Segments(
            self.lengths, groups, self.position_ids.to(device), self.offsets.to(device), self.restore.to(device)
        )


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to transformers. Doing it twice does nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, as transformers' interface asks for it.

    `query` is [1, heads, num_tokens, head_size], `key` and `value` have as many heads or a divisor of it; returns
    [1, num_tokens, heads, head_size]. Raises `ModelError` for a model whose attention is more than this (soft caps,
    sinks, position biases, dropout) or that does not hand `segments` down to its layers.
    """
    segments = _require_plain(module, segments, others | {"dropout": dropout or None, "attention_mask": attention_mask})
    rule = _Rule(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    rows = tuple(tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))  # [tokens, heads, head_size]
    with torch.autocast(device, enabled=False):
        return _attend_row(rows, segments, rule)[None], None


def _attend_row(rows: tuple[Tensor, ...], segments: Segments, rule: _Rule) -> Tensor:
    """[num_tokens, heads, head_size] of all segments."""
    query = rows[0]
    if query.is_cuda and _varlen_attention is not None and query.dtype in (torch.float16, torch.bfloat16):
        return _attend_varlen(rows, segments, rule)
    outputs = [_attend_group(rows, group, rule) for group in segments.groups]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[segments.restore]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a query sees besides its own segment's past: nothing, with these two numbers."""

    scale: float
    window: int | None
    """Tokens that a query sees at most, itself included; None is all."""


def _attend_group(rows: tuple[Tensor, ...], group: SegmentGroup, rule: _Rule) -> Tensor:
    """Attention of one group; `rows` are [num_tokens, heads, head_size] of the row, the output of the group alone."""
    query, key, value = (
        torch.unflatten(_gather(tensor, group), 0, (group.num_segments, group.max_len)).transpose(1, 2)
        for tensor in rows
    )
    output = _causal_attention(query, key, value, rule).transpose(1, 2).flatten(0, 1)
    return output[group.scatter]


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
    """[segments, heads, max_len, head_size], grouped-query aware; the best kernel for this length and dtype."""
    length = query.shape[2]
    if query.device.type == "cpu" and length <= _MATERIALIZE_UP_TO:
        return _materialized_attention(query, key, value, rule)
    bias = _causal_bias(length, rule, query) if rule.window is not None and length > rule.window else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=bias is None, scale=rule.scale, enable_gqa=True
    )


def _causal_bias(length: int, rule: _Rule, like: Tensor) -> Tensor:
    """[length, length]: 0 where a query may look, -inf elsewhere."""
    forbidden = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    if rule.window is not None and length > rule.window:
        forbidden |= torch.ones_like(forbidden).tril(-rule.window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(forbidden, float("-inf"))


class _Gather(torch.autograd.Function):
    """Rows into a padded group. Its gradient reads real tokens only, where indexing's own would add up padding.

    A token that several segments begin with gets the sum over all of them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SegmentGroup) -> Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        return tensor.index_select(0, group.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group, gradient = ctx.group, grads[0].new_zeros(ctx.shape)
        gradient[group.positions] = grads[0].index_select(0, group.scatter)
        if len(group.borrowed_scatter):
            gradient.index_add_(0, group.borrowed_positions, grads[0].index_select(0, group.borrowed_scatter))
        return gradient, None


class _MaterializedAttention(torch.autograd.Function):
    """Softmax attention with the scores of a block of queries at once: on CPU faster than torch's kernel when short.

    A block of queries meets only keys up to its own end, so most of what causality forbids is never computed. Queries
    that share a key head are stacked, so that keys and values are never repeated.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
        segments, heads, length, size = query.shape
        batch = segments * key.shape[1]
        queries = (query * rule.scale).reshape(batch, heads // key.shape[1], length, size)
        keys, values = (tensor.reshape(batch, length, size) for tensor in (key, value))
        output = torch.empty_like(queries)
        kept = []
        for start, end in _blocks(length):
            stacked = queries[:, :, start:end].flatten(1, 2)
            probabilities = _probabilities(stacked, keys[:, :end], start, rule)
            output[:, :, start:end] = torch.bmm(probabilities, values[:, :end]).view(batch, -1, end - start, size)
            kept.append(probabilities)
        if sum(probabilities.nbytes for probabilities in kept) > _KEEP_BYTES:
            kept = []
        ctx.save_for_backward(queries, keys, values, *kept)
        ctx.rule, ctx.shape, ctx.key_shape = rule, query.shape, key.shape
        return output.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *kept = ctx.saved_tensors
        grad = grads[0].reshape(queries.shape)
        grad_query, grad_keys, grad_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for index, (start, end) in enumerate(_blocks(queries.shape[2])):
            stacked, grad_block = (tensor[:, :, start:end].flatten(1, 2) for tensor in (queries, grad))
            own_keys = keys[:, :end]
            probabilities = kept[index] if kept else _probabilities(stacked, own_keys, start, ctx.rule)
            grad_values[:, :end] += torch.bmm(probabilities.mT, grad_block)
            grad_scores = torch._softmax_backward_data(
                torch.bmm(grad_block, values[:, :end].mT), probabilities, -1, probabilities.dtype
            )
            grad_keys[:, :end] += torch.bmm(grad_scores.mT, stacked)
            scaled = torch.bmm(grad_scores, own_keys).mul_(ctx.rule.scale)
            grad_query[:, :, start:end] = scaled.view(grad_query[:, :, start:end].shape)
        return grad_query.view(ctx.shape), grad_keys.view(ctx.key_shape), grad_values.view(ctx.key_shape), None


def _blocks(length: int) -> list[tuple[int, int]]:
    """Query blocks of nearly equal size, about `_QUERY_BLOCK` each."""
    count = max(1, round(length / _QUERY_BLOCK))
    edges = [length * index // count for index in range(count + 1)]
    return list(pairwise(edges))


def _probabilities(stacked: Tensor, keys: Tensor, start: int, rule: _Rule) -> Tensor:
    """[batch, queries per key head * block, keys]; queries are scaled already, the first stands at `start`."""
    length = keys.shape[1]
    bias = _causal_bias(length, rule, stacked)[start:].repeat(stacked.shape[1] // (length - start), 1)
    return torch.softmax(torch.bmm(stacked, keys.mT).add_(bias), dim=-1)


def _attend_varlen(rows: tuple[Tensor, ...], segments: Segments, rule: _Rule) -> Tensor:
    """Torch's own variable-length flash attention: no padding at all. CUDA, 16-bit."""
    query, key, value = (tensor.contiguous() for tensor in rows)
    longest = max(segments.lengths)
    output: Tensor = _varlen_attention(
        query,
        key,
        value,
        segments.offsets,
        segments.offsets,
        longest,
        longest,
        scale=rule.scale,
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _require_plain(module: torch.nn.Module, segments: Segments | None, others: dict[str, Any]) -> Segments:
    """The segments, if the module asks for no more than causal attention inside them."""
    name = type(module).__name__
    if segments is None:
        raise ModelError(f"{name} does not hand keyword arguments down to its attention")
    found = [argument for argument in _UNSUPPORTED if others.get(argument) is not None]
    if found:
        raise ModelError(f"{name} uses {', '.join(found)} in its attention")
    return segments


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Segments in groups of similar length, longest first."""
    groups: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda index: -int(lengths[index])):
        longest = int(lengths[groups[-1][0]]) if groups else 0
        if groups and (longest <= _ALWAYS_TOGETHER or int(lengths[segment]) >= MIN_FILL * longest):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _group(
    members: list[int], lengths: Sequence[int], starts: list[int], computed: Tensor, place: Tensor
) -> SegmentGroup:
    longest = int(lengths[members[0]])
    columns = torch.arange(longest)[None]
    member_lengths = torch.tensor([int(lengths[member]) for member in members])[:, None]
    firsts = torch.tensor([starts[member] for member in members])[:, None]
    tokens = (firsts + torch.minimum(columns, member_lengths - 1)).flatten()
    real, gather = (columns < member_lengths).flatten(), place[tokens]
    own, borrowed = ((real & kind).nonzero().squeeze(1) for kind in (computed[tokens], ~computed[tokens]))
    return SegmentGroup(len(members), longest, gather, own, gather[own], borrowed, gather[borrowed])


def _find_varlen_attention() -> Any:
    try:
        return importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None


_varlen_attention = _find_varlen_attention()
_gather: Callable[[Tensor, SegmentGroup], Tensor] = _Gather.apply
_materialized_attention: Callable[[Tensor, Tensor, Tensor, _Rule], Tensor] = _MaterializedAttention.apply
