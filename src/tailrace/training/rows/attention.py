"""Attention over packed rows: every segment attends to itself alone, and no mask of row length squared exists.

A row is [1, num_tokens]: samples side by side. `packed_attention` is registered with transformers' attention interface,
so that a model's own code runs unchanged and hands over queries, keys and values of the whole row:

    [1, heads, num_tokens, head_size] ──gather──► [segments, heads, max_len, head_size] per group of similar lengths
                                      ◄─scatter── causal attention; what was padded is never read back

On CPU one call over a padded group is several times faster than a call per segment. Padding lies to the right, where
causal attention cannot see it, so no mask is needed either. On a GPU in 16 bits the row goes to torch's variable-length
kernel as it is, and no group is made; where samples share prefixes, it is laid out in full around that kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from tailrace.errors import ModelError
from tailrace.training.rows.row_sharing import RowCut
from tailrace.training.rows.shared_prefixes import PrefixCopies, SharedPrefixes

PACKED_ATTENTION = "tailrace_packed"
"""Name of this attention in transformers' interface (`model.set_attn_implementation`)."""

MIN_FILL = 0.8
"""Shortest segment of a group, relative to its longest: attention's cost grows with the square of the padded length."""

_ALWAYS_TOGETHER = 32
"""Segments up to this many tokens share a group whatever their lengths: calls cost more than padding."""

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "dropout", "attention_mask")


GroupAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor | None]
"""Causal attention of a group by another kernel: queries, keys and values, scale, window. None: it is not for these."""


class Rule(NamedTuple):
    """How a segment attends to itself."""

    scale: float
    window: int | None
    """Tokens that a query sees at most, itself included; None is all."""
    kernel: GroupAttention | None


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments of similar length, padded to the longest. A token is borrowed where another segment computes it."""

    num_segments: int
    max_len: int
    gather: Tensor
    """[num_segments * max_len]: position in the row; padding repeats a segment's last token."""
    scatter: Tensor
    """[tokens of its own]: place in the padded group."""
    positions: Tensor
    """[tokens of its own]: position in the row."""
    borrowed_scatter: Tensor
    """[borrowed tokens]: place in the padded group."""
    borrowed_positions: Tensor
    """[borrowed tokens]: position in the row."""


@dataclass(slots=True)  # not frozen: torch.compile would look into it, and compile anew for each number of segments
class Segments:
    """How a row is divided. Built once per row, shared by all layers."""

    lengths: tuple[int, ...]
    groups: tuple[SegmentGroup, ...]
    """Empty where a kernel takes the row as it is."""
    position_ids: Tensor
    """[1, num_tokens of the row], from 0 in every segment; borrowed tokens are left out."""
    offsets: Tensor
    """[num_segments + 1], int32."""
    restore: Tensor
    """[num_tokens]: where each token of the row lies among the groups' real tokens, one group after the other."""
    copies: PrefixCopies | None = None
    """Without groups: where the kernel finds tokens that several segments begin with; None: none do."""

    @classmethod
    def of(cls, lengths: Sequence[int], shared: SharedPrefixes | None = None, *, padded: bool = True) -> Segments:
        """Divide a row into segments of these lengths, each at least 1; with `shared`, the row holds computed tokens.

        On the CPU: see `transfer.to_device`. The variable-length kernel needs no `padded` groups.
        """
        starts = np.concatenate([[0], np.cumsum(lengths)])
        num_tokens = int(starts[-1])
        computed = np.ones(num_tokens, np.bool_) if shared is None else shared.computed
        place = np.arange(num_tokens) if shared is None else shared.place
        position_ids = np.arange(num_tokens) - np.repeat(starts[:-1], lengths)
        members = _by_length(lengths) if padded else []
        groups = tuple(_group(one, lengths, starts, computed, place) for one in members)
        order = np.concatenate([np.empty(0, np.int64), *(group.positions.numpy() for group in groups)])
        restore = np.empty_like(order)
        restore[order] = np.arange(len(order))
        return cls(
            lengths=tuple(int(length) for length in lengths),
            groups=groups,
            position_ids=torch.from_numpy(position_ids[computed])[None],
            offsets=torch.from_numpy(starts.astype(np.int32)),
            restore=torch.from_numpy(restore),
            copies=None if padded or shared is None else PrefixCopies.of(shared),
        )


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
    group_attention: GroupAttention | None = None,
    cut: RowCut | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, as transformers' interface asks for it.

    `query` is [1, heads, num_tokens, head_size], `key` and `value` have as many heads or a divisor of it; returns
    [1, num_tokens, heads, head_size]. With `cut` these are this rank's tokens of a row that several ranks share, and
    `segments` are of the whole row. Raises `ModelError` for a model whose attention is more than this (soft caps,
    sinks, position biases, dropout) or that does not hand `segments` down to its layers.
    """
    name = type(module).__name__
    if segments is None:
        raise ModelError(f"{name} does not hand keyword arguments down to its attention")
    others |= {"dropout": dropout or None, "attention_mask": attention_mask}
    if found := [argument for argument in _UNSUPPORTED if others.get(argument) is not None]:
        raise ModelError(f"{name} uses {', '.join(found)} in its attention")
    rule = Rule(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, group_attention)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    rows = tuple(tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))  # [tokens, heads, head_size]
    with torch.autocast(device, enabled=False):
        if cut is None:
            return _attend_row(rows, segments, rule)[None], None
        return cut.gather_heads(_attend_row(cut.gather_tokens(*rows), segments, rule))[None], None


def _attend_row(rows: tuple[Tensor, ...], segments: Segments, rule: Rule) -> Tensor:
    """[num_tokens, heads, head_size] of all segments."""
    if not segments.groups:
        if (copies := segments.copies) is None:
            return _attend_ragged(rows, segments, rule)
        return copies.take(_attend_ragged(tuple(map(copies.spread, rows)), segments, rule))
    outputs = [_attend_group(rows, group, rule) for group in segments.groups]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[segments.restore]


def _attend_group(rows: tuple[Tensor, ...], group: SegmentGroup, rule: Rule) -> Tensor:
    """Attention of one group; `rows` are [num_tokens, heads, head_size] of the row, the output of the group alone."""
    query, key, value = (
        torch.unflatten(_gather(tensor, group), 0, (group.num_segments, group.max_len)).transpose(1, 2)
        for tensor in rows
    )
    return _causal_attention(query, key, value, rule).transpose(1, 2).flatten(0, 1)[group.scatter]


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """[segments, heads, max_len, head_size], grouped-query aware; the best kernel for this length and dtype."""
    length = query.shape[2]
    if rule.kernel is not None and (output := rule.kernel(query, key, value, rule.scale, rule.window)) is not None:
        return output
    bias = _window_bias(length, rule.window, query) if rule.window is not None and length > rule.window else None
    if query.is_cuda and query.dtype is torch.float32 and query.shape[1] != key.shape[1]:
        # Of CUDA's kernels only one takes float32 without scores of length squared, and it takes no grouped heads.
        key, value = _repeat_heads(query, key, value)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=bias is None,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _window_bias(length: int, window: int, like: Tensor) -> Tensor:
    """[length, length]: 0 where a query may look, -inf elsewhere."""
    seen = torch.ones(length, length, dtype=torch.bool, device=like.device).tril().triu(1 - window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


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


def _attend_ragged(rows: tuple[Tensor, ...], segments: Segments, rule: Rule) -> Tensor:
    """Torch's own variable-length flash attention: no padding at all. Raises `ModelError` for what it does not take."""
    query, key, value = (tensor.contiguous() for tensor in rows)
    head_size = query.shape[-1]
    if query.dtype not in _FLASH_DTYPES or head_size % 8 or head_size > 256:
        raise ModelError(f"variable-length attention does not take heads of {head_size} in {query.dtype}")
    if value.shape[-1] != head_size:
        raise ModelError(f"variable-length attention does not take values of {value.shape[-1]} to keys of {head_size}")
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.12 and later
            options["enable_gqa"] = True
        else:
            key, value = _repeat_heads(query, key, value)
    longest = max(segments.lengths)
    output = varlen_attn(
        query,
        key,
        value,
        segments.offsets,
        segments.offsets,
        longest,
        longest,
        scale=rule.scale,
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        **options,
    )
    return cast("Tensor", output)  # a tuple only where the log-sum-exps are asked for


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries have; heads are the second dimension."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


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
    members: list[int],
    lengths: Sequence[int],
    starts: NDArray[np.int64],
    computed: NDArray[np.bool_],
    place: NDArray[np.int64],
) -> SegmentGroup:
    longest = int(lengths[members[0]])
    columns = np.arange(longest)[None]
    member_lengths = np.array([int(lengths[member]) for member in members])[:, None]
    tokens = (starts[members][:, None] + np.minimum(columns, member_lengths - 1)).reshape(-1)
    real, gather = (columns < member_lengths).reshape(-1), place[tokens]
    own, borrowed = (np.flatnonzero(real & kind) for kind in (computed[tokens], ~computed[tokens]))
    indices = (gather, own, gather[own], borrowed, gather[borrowed])
    return SegmentGroup(len(members), longest, *(torch.from_numpy(index) for index in indices))


_gather: Callable[[Tensor, SegmentGroup], Tensor] = _Gather.apply
