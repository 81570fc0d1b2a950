"""A decoder layer of the common kind over the slots of an engine, by native passes: each reads activations once.

    stream ─ norm ─► [q|k|v] ─ norms, rotation ─► keys and values to the cache ─► attention ─► output ─ add ─► stream
    stream ─ norm ─► [gate|up] ─ silu(gate) up ─► down ─ add ─► stream

Attention of a running row reads just the row's own context, without masks. In bfloat16 it adds up in float32 and rounds
its result only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tailrace.cpu.kernels import Kernels
from tailrace.cpu.layers import LayerParts, known_layers
from tailrace.cpu.linears import JoinedLinear


class Step(Protocol):
    """What a layer needs to know of an engine's step: prompt chunks, then one token of each of the first slots."""

    rows: Tensor
    """[num_tokens]: each token's slot."""
    positions: Tensor
    """[num_tokens]"""
    num_decoding: int
    """How many of the tokens, the last ones, belong to running rows."""

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, kv_heads, room, size]."""

    def prefill(self, query: Tensor, layer: int, scale: float) -> list[Tensor]:
        """Attention of each prompt chunk over the cache, [1, length, heads, size]; `query` [1, heads, tokens, size]."""


class FusedLayers:
    """The layers of a model that native passes compute: all of them, or none."""

    def __init__(self, kernels: Kernels | None, model: nn.Module, num_layers: int, dtype: torch.dtype) -> None:
        self._modules: list[nn.Module] = []
        self._layers: list[_FusedLayer] = []
        found = known_layers(model) if dtype in (torch.float32, torch.bfloat16) else []
        if kernels is not None and len(found) == num_layers:
            self._modules = [module for module, _ in found]
            self._layers = [_FusedLayer.of(kernels, parts, dtype) for _, parts in found]
            for module, layer in zip(self._modules, self._layers, strict=True):
                module.forward = layer.forward

    @property
    def joined(self) -> list[JoinedLinear]:
        """The products of all layers."""
        return [joined for layer in self._layers for joined in (layer.packed, layer.output, layer.gate_up, layer.down)]

    def restore(self) -> None:
        """Give the layers their own forward back."""
        for module in self._modules:
            del module.forward
        self._modules, self._layers = [], []


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    kernels: Kernels
    parts: LayerParts
    dtype: torch.dtype
    packed: JoinedLinear
    output: JoinedLinear
    gate_up: JoinedLinear
    down: JoinedLinear

    @classmethod
    def of(cls, kernels: Kernels, parts: LayerParts, dtype: torch.dtype) -> _FusedLayer:
        products = ((*parts.projections,), (parts.output,), (*parts.gate_up,), (parts.down,))
        return cls(kernels, parts, dtype, *(JoinedLinear(linears) for linears in products))

    def forward(
        self, hidden_states: Tensor, *, slot_step: Step, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> Tensor:
        """As transformers calls a layer; `hidden_states` are [1, tokens, hidden_size]."""
        kernels, first, second = self.kernels, self.parts.input_norm, self.parts.mlp_norm
        stream = hidden_states[0].contiguous()
        _, normed, _ = kernels.add_norm(stream, None, first.weight, first.epsilon, self.dtype)
        attended = self._attend(self.packed(normed), slot_step, position_embeddings)
        stream, normed, _ = kernels.add_norm(stream, self.output(attended), second.weight, second.epsilon, self.dtype)
        return stream.add_(self.down(kernels.swiglu(self.gate_up(normed))))[None]

    def _attend(self, packed: Tensor, step: Step, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[tokens, heads * size]"""
        layer: int = self.parts.attention.layer_idx  # type: ignore[assignment]
        heads, caches = self.parts.heads, step.caches(layer)
        query = self.kernels.rotate_store(
            packed, self.parts.rotation(*angles), heads, slots=step.rows, positions=step.positions, caches=caches
        )
        chunks = step.prefill(query.transpose(0, 1)[None], layer, scale=1.0)
        attended = [chunk.reshape(-1, heads.queries * heads.size) for chunk in chunks]
        if step.num_decoding:
            first = len(packed) - step.num_decoding
            lengths = step.positions[first:] + 1
            attended.append(self.kernels.decode(query[first:], caches, lengths, heads))
        return attended[0] if len(attended) == 1 else torch.cat(attended)
