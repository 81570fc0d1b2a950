"""A decoder layer of the common kind in as few passes over activations as there are products to feed.

    stream ─ norm ─► [q|k|v] ─ norms, rotation, padding ─► attention ─► output ─┐
       └──────────────────────────────── add ◄──────────────────────────────────┘
    stream ─ norm ─► [gate|up] ─ silu(gate) up ─► down ─ add ─► stream

Each arrow is one product or one native pass, forward and backward alike; what a pass can compute again from what is
kept anyway is not kept. Products that share their input are one product. Under autocast everything between the stream
and its additions is bfloat16, rounded once per pass. CPU and packed rows only; the layer's own code runs otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tailrace.cpu.adapters import add_adapters
from tailrace.cpu.attention import MATERIALIZE_UP_TO, attend, attend_backward
from tailrace.cpu.kernels import Heads, Kernels, Rotation, find_kernels
from tailrace.cpu.layers import LayerParts, Norm, known_layers
from tailrace.cpu.linears import trained_products


class SegmentGroup(Protocol):
    """Segments of a packed row of similar length, padded to the longest."""

    num_segments: int
    max_len: int
    scatter: Tensor
    """[tokens of the group]: where each token that is the group's own lies in the padded group."""
    positions: Tensor
    """[tokens of the group]: where each of them lies in the row."""
    borrowed_scatter: Tensor
    """[borrowed tokens]: where each token that other segments computed lies in the padded group."""
    borrowed_positions: Tensor
    """[borrowed tokens]: where each of them lies in the row."""


class Segments(Protocol):
    """How a packed row is divided: what comes as the keyword argument `segments` of the model's forward."""

    groups: Sequence[SegmentGroup]


def fuse_layers(model: nn.Module) -> list[nn.Module]:
    """Give every layer of the common kind its fused forward; returns the layers."""
    kernels = find_kernels()
    if kernels is None or any(weight.dtype is not torch.float32 for weight in model.parameters()):
        return []
    found = known_layers(model)
    for layer, parts in found:
        layer.forward = _FusedLayer(kernels, parts, layer.forward).forward
    return [layer for layer, _ in found]


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    kernels: Kernels
    parts: LayerParts
    own: Callable[..., Tensor]

    def forward(self, hidden_states: Tensor, *others: Any, **arguments: Any) -> Tensor:
        """As transformers calls a layer; `hidden_states` are [1, tokens, hidden_size]."""
        segments: Segments | None = arguments.get("segments")
        if segments is None or others or not self._knows(segments, arguments):
            return self.own(hidden_states, *others, **arguments)
        parts, cosine_sine = self.parts, arguments["position_embeddings"]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        with torch.autocast("cpu", enabled=False):
            stream, normed = self._norm(hidden_states[0].contiguous(), None, parts.input_norm, dtype)
            packed = self._products(normed, *parts.projections)
            layout = _Layout(self.kernels, parts.heads, segments, parts.rotation(*cosine_sine))
            norms = (None, None) if parts.head_norms is None else tuple(norm.weight for norm in parts.head_norms)
            attended = _attention(packed, *norms, layout)
            stream, normed = self._norm(stream, self._products(attended, parts.output), parts.mlp_norm, dtype)
            gated = _swiglu(self._products(normed, *parts.gate_up), self.kernels)
            return _add(stream[None], self._products(gated, parts.down)[None])  # no view: FSDP hooks onto it

    def _products(self, inputs: Tensor, *linears: nn.Linear) -> Tensor:
        """Of linear layers that share `inputs`, with the adapters beside them."""
        beside = [self.parts.adapters.get(linear) for linear in linears]
        return add_adapters(trained_products(inputs, *linears), inputs, linears, beside)

    def _knows(self, segments: Segments, arguments: dict[str, Any]) -> bool:
        """Whether this is a packed row without a very long segment, all of it here: those are left to torch's blockwise
        attention, slices to ranks that exchange tokens for heads."""
        return (
            arguments.get("attention_mask") is None
            and arguments.get("cut") is None
            and arguments["position_embeddings"][0].shape[-1] == self.parts.heads.size
            and all(group.max_len <= MATERIALIZE_UP_TO for group in segments.groups)
        )

    def _norm(self, stream: Tensor, delta: Tensor | None, norm: Norm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _add_norm(stream, delta, norm.weight, norm.epsilon, dtype, self.kernels)


class _AddNorm(torch.autograd.Function):
    """The stream with `delta` added, and its norm."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        stream: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        total, normed, inverse = kernels.add_norm(stream, delta, weight, epsilon, dtype)
        ctx.save_for_backward(total, inverse, weight)
        ctx.kernels, ctx.has_delta = kernels, delta is not None
        return total.view_as(total) if delta is None else total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse, weight = ctx.saved_tensors
        grad_total, grad_normed = (grad.contiguous() for grad in grads)
        grad, rounded, grad_weight = ctx.kernels.add_norm_backward(total, inverse, weight, grad_total, grad_normed)
        return grad, rounded if ctx.has_delta else None, grad_weight, None, None, None


class _Add(torch.autograd.Function):
    """`stream + delta`, whose gradient is rounded to the dtype of `delta` once."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, delta: Tensor) -> Tensor:
        ctx.dtype = delta.dtype
        return stream + delta.to(stream.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].to(ctx.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.kernels.swiglu_backward(gate_up, grads[0].contiguous()), None


class _Layout(NamedTuple):
    """How packed tokens become padded groups."""

    kernels: Kernels
    heads: Heads
    segments: Segments
    rotation: Rotation


class _Attention(torch.autograd.Function):
    """From packed [tokens, queries | keys | values] to attended [tokens, heads * size], group by group."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, _query: Tensor | None, _key: Tensor | None, layout: _Layout) -> Tensor:
        kernels, heads = layout.kernels, layout.heads
        output = packed.new_empty(len(packed), heads.queries * heads.size)
        kept: list[Tensor] = []
        ctx.counts = []
        for group in layout.segments.groups:
            places = _padded_places(group)
            padded = kernels.rotate_gather(packed, layout.rotation, heads, gather=places, segments=group.num_segments)
            attended, probabilities = attend(*padded, window=None, kernels=kernels)
            kernels.move(attended, group.scatter, group.positions, output, inward=False)
            kept += [*padded, *probabilities]
            ctx.counts.append(len(probabilities))
        ctx.layout = layout
        ctx.save_for_backward(packed, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, *kept = ctx.saved_tensors
        layout: _Layout = ctx.layout
        groups = layout.segments.groups
        padded_grads = []
        for group, count in zip(groups, ctx.counts, strict=True):
            (query, key, value), probabilities, kept = kept[:3], kept[3 : 3 + count], kept[3 + count :]
            grad_output = torch.zeros_like(query)
            layout.kernels.move(grad_output, group.scatter, group.positions, grads[0].contiguous(), inward=True)
            padded_grads.append(
                attend_backward((query, key, value), probabilities, grad_output, window=None, kernels=layout.kernels)
            )
        grad = torch.empty_like(packed)
        weights = layout.rotation.query_weight, layout.rotation.key_weight
        grad_weights = [packed.new_zeros(layout.heads.size, dtype=torch.float32) for _ in weights]
        for adds in (False, True):  # a token is written where it is computed before others add what they borrowed
            for group, padded in zip(groups, padded_grads, strict=True):
                layout.kernels.rotate_gather_backward(
                    packed,
                    layout.rotation,
                    layout.heads,
                    places=group.borrowed_scatter if adds else group.scatter,
                    tokens=group.borrowed_positions if adds else group.positions,
                    grads=padded,
                    adds=adds,
                    grad=grad,
                    grad_query_weight=grad_weights[0],
                    grad_key_weight=grad_weights[1],
                )
        found = [None if weight is None else grad for weight, grad in zip(weights, grad_weights, strict=True)]
        return grad, *found, None


def _padded_places(group: SegmentGroup) -> Tensor:
    """[num_segments * max_len]: the token of every place, -1 for padding."""
    places = torch.full((group.num_segments * group.max_len,), -1)
    places[group.scatter] = group.positions
    places[group.borrowed_scatter] = group.borrowed_positions
    return places


_add_norm: Callable[..., tuple[Tensor, Tensor]] = _AddNorm.apply
_add: Callable[[Tensor, Tensor], Tensor] = _Add.apply
_swiglu: Callable[[Tensor, Kernels], Tensor] = _SwiGlu.apply
_attention: Callable[..., Tensor] = _Attention.apply
