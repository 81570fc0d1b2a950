"""Keys and values of every slot, head-major, so that the running rows are a plain slice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_FIRST_TOKENS = 128
"""Tokens that a slot has room for at first."""

_GROWTH = 1.25
"""Factor by which room grows at least: each growth copies what is held."""

_GRAIN_TOKENS = 64
"""Room is a multiple of it."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer caches per token, for how many query heads."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """One pair of tensors per layer, `[slots, kv_heads, room, head_dim]`; `reserve` makes room as contexts grow.

    Room that no context needs would lie between those that are read, in huge pages that are cleared as a whole.
    Zeroed: masked positions still enter the sums with weight 0, and 0 times an uninitialised NaN is NaN.
    """

    def __init__(
        self, layers: list[LayerShape], *, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        self._capacity = capacity
        self.kv_heads = [layer.kv_heads for layer in layers]
        self.room = min(capacity, _FIRST_TOKENS)
        self.keys = [_zeros((slots, layer.kv_heads, self.room, layer.key_dim), dtype, device) for layer in layers]
        self.values = [_zeros((slots, layer.kv_heads, self.room, layer.value_dim), dtype, device) for layer in layers]

    def reserve(self, num_tokens: int) -> None:
        """Make room for contexts of `num_tokens`, which is the capacity at most."""
        if num_tokens <= self.room:
            return
        wanted = max(num_tokens, math.ceil(_GROWTH * self.room))
        held, self.room = self.room, min(self._capacity, -(-wanted // _GRAIN_TOKENS) * _GRAIN_TOKENS)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):  # one at a time: no more than one tensor is there twice
                tensors[layer] = _zeros((*old.shape[:2], self.room, old.shape[3]), old.dtype, old.device)
                tensors[layer][:, :, :held] = old

    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new keys and values `[1, kv_heads, num_tokens, head_dim]` at `index` (see `write_index`)."""
        for cached, new in ((self.keys[layer], keys), (self.values[layer], values)):
            flat = cached.view(-1, cached.shape[-1])
            flat.index_copy_(0, index, new[0].transpose(0, 1).reshape(-1, flat.shape[1]))

    def write_index(self, kv_heads: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where each token's heads lie in the flattened cache: `[num_tokens * kv_heads]`, tokens outermost."""
        heads = torch.arange(kv_heads, device=rows.device)
        return (rows * (kv_heads * self.room) + positions).unsqueeze(1).add(heads * self.room).view(-1)

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of one row to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def swap_rows(self, first: int, second: int, num_first: int, num_second: int) -> None:
        """Exchange the first `num_first` tokens of one row and the first `num_second` of another."""
        if num_first < num_second:
            first, second, num_first, num_second = second, first, num_second, num_first
        for tensor in (*self.keys, *self.values):
            kept = tensor[second, :, :num_second].clone()
            tensor[second, :, :num_first] = tensor[first, :, :num_first]
            tensor[first, :, :num_second] = kept

    def clear_row(self, row: int) -> None:
        """Zero a row, whose values may not be finite."""
        for tensor in (*self.keys, *self.values):
            tensor[row] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in memory that the system hands out when it is first written (`torch.zeros` writes it all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
