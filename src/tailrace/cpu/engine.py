"""The hook for the torch engine: what is computed faster over its model and its slots, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailrace.cpu.engine_layers import FusedLayers
from tailrace.cpu.few_queries import MAX_QUERIES_PER_KEY, ValueRows, attend_few_queries
from tailrace.cpu.kernels import find_kernels
from tailrace.cpu.lanes import ordering_exchanges, plan_lanes
from tailrace.cpu.linears import JoinedLinear, Packed, PackedLinears, write_programs

Sample = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of `Kernels.sample`."""


@dataclass(frozen=True, slots=True)
class EngineAcceleration:
    """What the engine asks and calls instead of its own."""

    linears: Sequence[JoinedLinear]
    """Products that the model's linear layers compute with; the plain weights of those are not read any more."""
    has_ragged_decode: bool
    """Whether a running row's attention reads its own context alone, so that neighbours' lengths don't matter."""
    few_queries: Sequence[bool]
    """Per layer, whether `attend_few_queries` is the faster way to decode."""
    sample: Sample | None
    """Draws tokens where all of the vocabulary counts, reading each row of logits once."""

    @property
    def taken_over(self) -> set[nn.Linear]:
        """The model's linear layers whose weights lie in `linears`."""
        return {module for linear in self.linears for module in linear.modules}

    def pack(self, new: Callable[[Tensor], Tensor]) -> list[Packed]:
        """Lay out the `new` values of the parameters that were taken over. In any thread."""
        return [linear.pack(new) for linear in self.linears]

    def exchange(self, packed: Sequence[Packed]) -> list[Packed]:
        """Compute with what `pack` made; returns what was computed with before."""
        return [linear.exchange(new) for linear, new in zip(self.linears, packed, strict=True)]

    def plan_lanes(self, lengths: NDArray[np.int64], room: int) -> Sequence[tuple[int, int, int]]:
        """Which running rows attend together: begin, end and longest context; none where nobody asks."""
        return () if self.has_ragged_decode else plan_lanes(lengths, room)

    def exchanges(self, lengths: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """Pairs of rows to exchange first, so that neighbours have contexts of similar length."""
        return () if self.has_ragged_decode else ordering_exchanges(lengths)

    def decode(
        self,
        layer: int,
        queries: Tensor,  # [rows of the lane, kv_heads, queries per key head, key_dim]
        caches: tuple[Tensor, Tensor],  # [slots, kv_heads, room, dim]
        lane: tuple[int, int, int],
        *,
        mask: Tensor,
        scale: float,
        memo: MutableMapping[object, ValueRows],
    ) -> Tensor | None:
        """Attention of a lane, [rows * heads, value_dim]; None for a layer that gains nothing. `memo` lasts a step."""
        if not self.few_queries[layer]:
            return None
        (keys, values), (begin, end, longest) = caches, lane
        kv_heads, room = values.shape[1:3]
        heads = kv_heads * queries.shape[2]
        value_rows = memo.get((lane, kv_heads, heads))
        if value_rows is None:
            value_rows = memo[lane, kv_heads, heads] = ValueRows.of(lane, kv_heads=kv_heads, heads=heads, room=room)
        return attend_few_queries(queries, keys[begin:end, :, :longest], values, value_rows, mask=mask, scale=scale)


def speed_up_engine(
    model: nn.Module,
    heads: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    native_kernels: bool,
    is_unchanged: Callable[[], bool],
) -> EngineAcceleration:
    """Speed up a model on a CPU. Weights that are taken over change by `EngineAcceleration.exchange` from now on.

    `heads` are those of queries and of keys, per layer. `is_unchanged` says whether the model still answers as before:
    layers whose answers change keep their own code.
    """
    kernels = find_kernels() if native_kernels else None
    fused = FusedLayers(kernels, model, len(heads), dtype)
    if len(fused) and not is_unchanged():
        fused.restore()
    packed = PackedLinears(model, leave={module for joined in fused.joined for module in joined.modules})
    linears = [*fused.joined, *packed.joined]
    write_programs(linears)
    few = [dtype is torch.float32 and queries <= MAX_QUERIES_PER_KEY * keys for queries, keys in heads]
    return EngineAcceleration(linears, len(fused) > 0, few, None if kernels is None else kernels.sample)
