"""Attention of few queries over the slots is scaled dot-product attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tailrace.cpu.few_queries import ValueRows, attend_few_queries


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_few_queries_attend_as_torch_does(heads: int) -> None:
    torch.manual_seed(0)
    begin, end, longest, room, kv_heads = 1, 4, 11, 16, 2
    keys, values = torch.randn(5, kv_heads, room, 8), torch.randn(5, kv_heads, room, 24)
    queries = torch.randn(end - begin, kv_heads, heads // kv_heads, 8)
    lengths = torch.tensor([11, 4, 7]).view(-1, 1, 1, 1)
    mask = torch.zeros(3, 1, 1, longest).masked_fill_(torch.arange(longest) >= lengths, -torch.inf)
    value_rows = ValueRows.of((begin, end, longest), kv_heads=kv_heads, heads=heads, room=room)
    found = attend_few_queries(queries, keys[begin:end, :, :longest], values, value_rows, mask=mask, scale=0.3)
    expected = functional.scaled_dot_product_attention(
        queries, keys[begin:end, :, :longest], values[begin:end, :, :longest], attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(found.view_as(expected), expected)
