"""The hook for the torch engine: what is computed faster over its model and its slots, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tailrace.cpu.engine_layers import FusedLayers
from tailrace.cpu.kernels import find_kernels
from tailrace.cpu.linears import JoinedLinear, Packed, PackedLinears, write_programs

Sample = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`Kernels.sample`."""


@dataclass(frozen=True, slots=True)
class EngineAcceleration:
    """What the engine calls instead of its own code."""

    linears: Sequence[JoinedLinear]
    """Products that replace linear layers of the model, whose plain weights are no longer read."""
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
        """Compute with what `pack` made; returns the previous weights."""
        return [linear.exchange(new) for linear, new in zip(self.linears, packed, strict=True)]


def speed_up_engine(
    model: nn.Module,
    num_layers: int,
    dtype: torch.dtype,
    *,
    native_kernels: bool,
    probe: Callable[[], None],
) -> EngineAcceleration:
    """Speed up a model on a CPU. Weights that are taken over change by `EngineAcceleration.exchange` from now on.

    `probe` has the model compute a step over a cache in float32: layers that native passes would change keep their own
    code.
    """
    kernels = find_kernels() if native_kernels else None
    fused = FusedLayers(kernels, model, num_layers, dtype, probe)
    packed = PackedLinears(model, leave={module for joined in fused.joined for module in joined.modules})
    linears = [*fused.joined, *packed.joined]
    write_programs(linears)
    return EngineAcceleration(linears, None if kernels is None else kernels.sample)
