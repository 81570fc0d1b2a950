"""The hook for the trainer: what is computed faster by its model, with gradients, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tailrace.cpu.attention import materialized_attention
from tailrace.cpu.linears import speed_up_linears
from tailrace.cpu.norms import fuse_norms
from tailrace.cpu.products import add_outer_product, fast_product
from tailrace.cpu.trainer_layers import fuse_layers


@dataclass(slots=True)
class TrainerAcceleration:
    """What was sped up."""

    fused_layers: list[nn.Module]
    """Layers that native passes compute, for rows whose `segments` are short."""

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor | None:
        """Attention over padded segments; see `materialized_attention`."""
        return materialized_attention(query, key, value, scale, window)

    @staticmethod
    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        """`rows` [num_rows, inputs] times the transpose of `matrix` [outputs, inputs]."""
        return fast_product(rows, matrix)

    @staticmethod
    def add_outer_product(total: Tensor, grads: Tensor, inputs: Tensor) -> None:
        """To `total` the transpose of `grads` [num_rows, outputs] times `inputs` [num_rows, inputs]."""
        add_outer_product(total, grads, inputs)

    def restore_layers(self) -> None:
        """Give fused layers their own forward back."""
        for layer in self.fused_layers:
            del layer.forward
        self.fused_layers = []


def speed_up_trainer(model: nn.Module, *, native_kernels: bool, under_autocast: bool) -> TrainerAcceleration:
    """Speed up a float32 model on a CPU. Whether fused layers still answer as before is for the caller to try out."""
    fuse_norms(model)
    if not under_autocast:
        speed_up_linears(model)
    return TrainerAcceleration(fuse_layers(model) if native_kernels else [])
