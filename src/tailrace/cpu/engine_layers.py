"""A decoder layer of the common kind over the slots of an engine, by native passes: each reads activations once.

    stream ─ norm ─► [q|k|v] ─ norms, rotation ─► keys and values to the cache ─► attention ─► output ─ add ─► stream
    stream ─ norm ─► [gate|up] ─ silu(gate) up ─► down ─ add ─► stream

Attention of a running row reads just the row's own context, without masks. In bfloat16 it adds up in float32 and rounds
its result only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from tailrace.cpu.kernels import Kernels
from tailrace.cpu.layers import LayerParts, known_layers
from tailrace.cpu.linears import JoinedLinear, products_agree

_Product: TypeAlias = Callable[[Tensor], Tensor]
"""Of rows [rows, inputs] with the weights of linear layers, side by side: [rows, sum of outputs]."""

_OF_ADDED, _OF_STREAM = 1e-3, 1e-5
"""Largest difference between two ways to compute a layer in float32: of what it adds to the stream, and of the stream.
Real models come to 3e-5 of the first, layers that compute something else to 5e-3 and more, by whatever weights."""


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

    def __init__(
        self, kernels: Kernels | None, model: nn.Module, num_layers: int, dtype: torch.dtype, probe: Callable[[], None]
    ) -> None:
        """`probe` has the model compute a step over a cache in float32, on which native passes are tried out."""
        self.joined: list[JoinedLinear] = []
        """The products of all layers."""
        found = known_layers(model) if dtype in (torch.float32, torch.bfloat16) else []
        if kernels is None or len(found) != num_layers or not _compute_the_same(kernels, found, probe):
            return
        joined: list[JoinedLinear] = []

        def join(linears: Sequence[nn.Linear]) -> JoinedLinear:
            joined.append(JoinedLinear(linears))
            return joined[-1]

        layers = [_FusedLayer.of(kernels, parts, dtype, join) for _, parts in found]
        if products_agree(joined):
            self.joined = joined
            for (module, _), layer in zip(found, layers, strict=True):
                module.forward = layer.forward


def _compute_the_same(
    kernels: Kernels, layers: Sequence[tuple[nn.Module, LayerParts]], probe: Callable[[], None]
) -> bool:
    """Whether native passes compute what the layers do: each in float32, where nothing but rounding may differ."""
    answers: list[bool] = []
    for module, parts in layers:
        module.forward = _tried(kernels, module, parts, answers)
    try:
        probe()
    finally:
        for module, _ in layers:
            del module.forward
    return len(answers) == len(layers) and all(answers)


def _tried(kernels: Kernels, module: nn.Module, parts: LayerParts, answers: list[bool]) -> Callable[..., Tensor]:
    """The layer's own forward in float32, which notes whether native passes answer the same."""
    own = module.forward

    def forward(hidden_states: Tensor, **arguments: Any) -> Tensor:
        with _in_float32(module), torch.autocast("cpu", enabled=False):
            expected: Tensor = own(hidden_states, **arguments)
            answers.append(arguments["position_embeddings"][0].shape[-1] == parts.heads.size)
            if answers[-1]:
                fused = _FusedLayer.of(kernels, parts, torch.float32, _plain)
                answers[-1] = _agree(fused.forward(hidden_states, **arguments), expected, hidden_states)
        return expected

    return forward


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    for parameter, data in own:
        parameter.data = data.float()
    try:
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


def _agree(found: Tensor, expected: Tensor, stream: Tensor) -> bool:
    """Whether each token's difference is small beside what the layer adds to its stream [1, tokens, hidden_size]."""
    difference, added = ((one - other).norm(dim=-1) for one, other in ((found, expected), (expected, stream)))
    return bool((difference <= _OF_ADDED * added + _OF_STREAM * stream.norm(dim=-1)).all())


def _plain(linears: Sequence[nn.Linear]) -> _Product:
    """What `JoinedLinear` computes, for once: nothing is laid out."""
    return lambda rows: torch.cat([linear(rows) for linear in linears], dim=1)


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    kernels: Kernels
    parts: LayerParts
    dtype: torch.dtype
    packed: _Product
    output: _Product
    gate_up: _Product
    down: _Product

    @classmethod
    def of(
        cls, kernels: Kernels, parts: LayerParts, dtype: torch.dtype, join: Callable[[Sequence[nn.Linear]], _Product]
    ) -> _FusedLayer:
        products = ((*parts.projections,), (parts.output,), (*parts.gate_up,), (parts.down,))
        return cls(kernels, parts, dtype, *(join(linears) for linears in products))

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
