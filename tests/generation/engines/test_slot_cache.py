"""The slot cache grows as contexts do."""

from __future__ import annotations

import torch

from tailrace.generation.engines.torch.cache import LayerShape, SlotCache


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
