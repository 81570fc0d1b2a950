"""The slot cache grows as contexts do, and attention over it is scaled dot-product attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tailrace.generation.engines.torch.cache import LayerShape, SlotCache
from tailrace.generation.engines.torch.few_queries import ValueRows, attend_few_queries


def test_what_is_cached_survives_growth_up_to_the_capacity() -> None:
    layer = LayerShape(heads=4, kv_heads=2, key_dim=3, value_dim=5)
    cache = SlotCache([layer], slots=3, capacity=300, dtype=torch.float32, device=torch.device("cpu"))
    keys, values = torch.randn(1, 2, 6, 3), torch.randn(1, 2, 6, 5)
    rows, positions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    cache.write(0, cache.write_index(2, rows, positions), keys, values)
    for num_tokens in (2, 130, 299, 300):
        cache.reserve(num_tokens)
        assert num_tokens <= cache.room <= 300
        assert torch.equal(cache.keys[0][rows, :, positions], keys[0].transpose(0, 1))
        assert torch.equal(cache.values[0][rows, :, positions], values[0].transpose(0, 1))
        assert not cache.keys[0][:, :, 2:].any()


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_few_queries_attend_as_torch_does(heads: int) -> None:
    torch.manual_seed(0)
    begin, end, longest, room, kv_heads = 1, 4, 11, 16, 2
    keys, values = torch.randn(5, kv_heads, room, 8), torch.randn(5, kv_heads, room, 24)
    queries = torch.randn(end - begin, kv_heads, heads // kv_heads, 8)
    lengths = torch.tensor([11, 4, 7]).view(-1, 1, 1, 1)
    mask = torch.zeros(3, 1, 1, longest).masked_fill_(torch.arange(longest) >= lengths, -torch.inf)
    value_rows = ValueRows.of(begin, end, longest, kv_heads=kv_heads, heads=heads, room=room)
    found = attend_few_queries(queries, keys[begin:end, :, :longest], values, value_rows, mask=mask, scale=0.3)
    expected = functional.scaled_dot_product_attention(
        queries, keys[begin:end, :, :longest], values[begin:end, :, :longest], attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(found.view_as(expected), expected)
