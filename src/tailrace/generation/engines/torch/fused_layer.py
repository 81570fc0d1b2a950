"""A decoder layer of the common kind over the slots, by native passes: each reads and writes activations once.

    stream ─ norm ─► [q|k|v] ─ norms, rotation ─► keys and values to the cache ─► attention ─► output ─ add ─► stream
    stream ─ norm ─► [gate|up] ─ silu(gate) up ─► down ─ add ─► stream

Attention of a running row reads just the row's own context, so that neither masks nor lanes are needed. In bfloat16 it
adds up in float32 and rounds its result only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.generation.engines.native import Kernels, find_kernels
from tailrace.generation.engines.native.layers import LayerParts, known_layers
from tailrace.generation.engines.torch.attention import SlotStep, prefill
from tailrace.generation.engines.torch.packed_linear import JoinedLinear


class FusedLayers:
    """The layers of a model that native passes compute: all of them, or none."""

    def __init__(self, model: nn.Module, num_layers: int, dtype: torch.dtype) -> None:
        kernels = _kernels_for(model, dtype)
        self._modules: list[nn.Module] = []
        self._layers: list[_FusedLayer] = []
        found = known_layers(model)
        if kernels is not None and len(found) == num_layers:
            self._modules = [module for module, _ in found]
            self._layers = [_FusedLayer.of(kernels, parts, module.forward, dtype) for module, parts in found]
            for module, layer in zip(self._modules, self._layers, strict=True):
                module.forward = layer.forward

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def joined(self) -> list[JoinedLinear]:
        """The products of all layers."""
        return [joined for layer in self._layers for joined in layer.joined]

    def restore(self) -> None:
        """Give the layers their own forward back."""
        for module in self._modules:
            del module.forward
        self._modules, self._layers = [], []


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    kernels: Kernels
    parts: LayerParts
    own: Callable[..., Tensor]
    dtype: torch.dtype
    packed: JoinedLinear
    output: JoinedLinear
    gate_up: JoinedLinear
    down: JoinedLinear

    @classmethod
    def of(cls, kernels: Kernels, parts: LayerParts, own: Callable[..., Tensor], dtype: torch.dtype) -> _FusedLayer:
        products = ((*parts.projections,), (parts.output,), (*parts.gate_up,), (parts.down,))
        return cls(kernels, parts, own, dtype, *(JoinedLinear(linears) for linears in products))

    @property
    def joined(self) -> tuple[JoinedLinear, ...]:
        return self.packed, self.output, self.gate_up, self.down

    def forward(self, hidden_states: Tensor, *others: Any, **arguments: Any) -> Tensor:
        """As transformers calls a layer; `hidden_states` are [1, tokens, hidden_size]."""
        step = arguments.get("slot_step")
        if others or not isinstance(step, SlotStep):
            return self.own(hidden_states, *others, **arguments)
        parts, kernels = self.parts, self.kernels
        stream, first, second = hidden_states[0].contiguous(), parts.input_norm, parts.mlp_norm
        _, normed, _ = kernels.add_norm(stream, None, first.weight, first.epsilon, self.dtype)
        attended = self._attend(self.packed(normed), step, arguments["position_embeddings"])
        stream, normed, _ = kernels.add_norm(stream, self.output(attended), second.weight, second.epsilon, self.dtype)
        return stream.add_(self.down(kernels.swiglu(self.gate_up(normed))))[None]

    def _attend(self, packed: Tensor, step: SlotStep, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[tokens, heads * size]"""
        layer: int = self.parts.attention.layer_idx  # type: ignore[assignment]
        heads, caches = self.parts.heads, (step.cache.keys[layer], step.cache.values[layer])
        query = self.kernels.rotate_store(
            packed, self.parts.rotation(*angles), heads, slots=step.rows, positions=step.positions, caches=caches
        )
        attended = [
            prefill(step, index, query.transpose(0, 1)[None], layer=layer, scale=1.0).reshape(
                -1, heads.queries * heads.size
            )
            for index in range(len(step.segments))
        ]
        if step.num_decoding:
            first = len(packed) - step.num_decoding
            lengths = step.positions[first:] + 1
            attended.append(self.kernels.decode(query[first:], caches, lengths, heads, None))
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _kernels_for(model: nn.Module, dtype: torch.dtype) -> Kernels | None:
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return find_kernels() if on_cpu and dtype in (torch.float32, torch.bfloat16) else None
