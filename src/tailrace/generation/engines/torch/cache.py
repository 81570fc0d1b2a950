"""Keys and values of every slot, preallocated, head-major, so that the running rows are a plain slice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer caches per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """One pair of tensors per layer, `[slots, kv_heads, capacity, head_dim]`.

    Zeroed at birth: masked positions still enter the sums with weight 0, and 0 times an uninitialised NaN is NaN. On a
    CPU, pages that no token reached yet cost nothing.
    """

    def __init__(
        self, layers: list[LayerShape], *, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        self.slots, self.capacity = slots, capacity
        self.keys = [_zeros((slots, layer.kv_heads, capacity, layer.key_dim), dtype, device) for layer in layers]
        self.values = [_zeros((slots, layer.kv_heads, capacity, layer.value_dim), dtype, device) for layer in layers]
        self._flat_keys = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self._flat_values = [values.view(-1, values.shape[-1]) for values in self.values]
        self.kv_heads = [layer.kv_heads for layer in layers]

    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new keys and values `[1, kv_heads, num_tokens, head_dim]` at `index` (see `write_index`)."""
        flat_keys, flat_values = self._flat_keys[layer], self._flat_values[layer]
        flat_keys.index_copy_(0, index, keys[0].transpose(0, 1).reshape(-1, flat_keys.shape[1]))
        flat_values.index_copy_(0, index, values[0].transpose(0, 1).reshape(-1, flat_values.shape[1]))

    def write_index(self, kv_heads: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where each token's heads lie in the flattened cache: `[num_tokens * kv_heads]`, tokens outermost."""
        heads = torch.arange(kv_heads, device=rows.device)
        return (rows * (kv_heads * self.capacity) + positions).unsqueeze(1).add(heads * self.capacity).view(-1)

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
