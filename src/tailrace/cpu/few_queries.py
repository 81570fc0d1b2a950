"""Attention of one new token per row in float32 on a CPU, where up to three query heads share a key head.

SDPA is bound by memory latency there. Two operations fetch ahead: a batched product of queries and keys for the
scores, and for the sums of values `embedding_bag`, which adds up rows of a table by weights. In bfloat16 torch's kernel
stays: whatever adds up in another order than a model's own attention rounds otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_QUERIES_PER_KEY = 3
"""Each reads the values for itself; from four on a kernel that reads them once is as fast."""


@dataclass(frozen=True, slots=True)
class ValueRows:
    """Which rows of the flattened values `[slots * kv_heads * room, value_dim]` the queries of a lane add up."""

    index: Tensor
    """[rows * heads * longest], int32."""
    starts: Tensor
    """[rows * heads], int32: where each query's part of `index` begins."""

    @classmethod
    def of(cls, lane: tuple[int, int, int], *, kv_heads: int, heads: int, room: int) -> ValueRows:
        """The first `longest` tokens of the slots `[begin, end)` (together the `lane`), once per query head."""
        begin, end, longest = lane
        first = torch.arange(begin * kv_heads, end * kv_heads, dtype=torch.int32).mul_(room)
        tokens = first.repeat_interleave(heads // kv_heads).unsqueeze(1) + torch.arange(longest, dtype=torch.int32)
        return cls(tokens.view(-1), torch.arange(0, tokens.numel(), longest, dtype=torch.int32))


def attend_few_queries(
    queries: Tensor,  # [rows, kv_heads, queries per key head, key_dim]
    keys: Tensor,  # [rows, kv_heads, longest, key_dim]
    values: Tensor,  # [slots, kv_heads, room, value_dim], contiguous
    value_rows: ValueRows,
    *,
    mask: Tensor,  # [rows, 1, 1, longest], additive
    scale: float,
) -> Tensor:
    """`[rows * heads, value_dim]`."""
    scores = torch.bmm((queries * scale).flatten(0, 1), keys.flatten(0, 1).mT).view(*queries.shape[:3], -1)
    weights = torch.softmax(scores.add_(mask), dim=-1)
    table = values.view(-1, values.shape[-1])
    sums: Tensor = torch.embedding_bag(
        table, value_rows.index, value_rows.starts, mode=0, per_sample_weights=weights.view(-1)
    )[0]
    return sums
