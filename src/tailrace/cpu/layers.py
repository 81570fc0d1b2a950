"""Finds decoder layers of the common kind, which native passes compute, by their parts.

    x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x)))      (Llama, Qwen2, Qwen3, ...)

Their linear layers may have adapters beside them.

Scaled residuals and layers without positions do not show in the parts: callers compare outputs, and leave the model its
own code where these would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.cpu.adapters import AdapterBeside, parted
from tailrace.cpu.kernels import Heads, Rotation

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_EPSILON_NAMES = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm: `x / sqrt(mean(x²) + epsilon) * weight`."""

    module: nn.Module
    epsilon: float

    @property
    def weight(self) -> Tensor:
        """[size]"""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one decoder layer."""

    input_norm: Norm
    projections: tuple[nn.Linear, nn.Linear, nn.Linear]
    """Of queries, keys and values."""
    head_norms: tuple[Norm, Norm] | None
    """Of queries and keys."""
    attention: nn.Module
    output: nn.Linear
    mlp_norm: Norm
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    heads: Heads
    scale: float
    adapters: Mapping[nn.Linear, AdapterBeside]
    """Beside the linear layers, of those that have one."""

    def rotation(self, cosine: Tensor, sine: Tensor) -> Rotation:
        """What the layer does to queries and keys, for angles [1, tokens, size] as transformers hands them out."""
        norms = self.head_norms
        return Rotation(
            query_weight=None if norms is None else norms[0].weight.detach(),
            key_weight=None if norms is None else norms[1].weight.detach(),
            epsilon=0.0 if norms is None else norms[0].epsilon,
            cosine=cosine[0].float().contiguous(),
            sine=sine[0].float().contiguous(),
            scale=self.scale,
        )


def known_layers(model: nn.Module) -> list[tuple[nn.Module, LayerParts]]:
    """Every decoder layer of the known kind, in order; nothing when the model's attention is more than causal."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if config is not None else None
    unusual = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size")
    if any(getattr(config, name, None) is not None for name in unusual):
        return []
    found = ((module, parts_of(module)) for module in model.modules())
    return [(module, parts) for module, parts in found if parts is not None]


def parts_of(layer: nn.Module) -> LayerParts | None:
    """The layer's parts; None for any other module."""
    parts: Any = layer
    if not _has_known_names(parts):
        return None
    attention, mlp = parts.self_attn, parts.mlp
    projections, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    found = [parted(linear) for linear in (*projections, attention.o_proj, *gate_up, mlp.down_proj)]
    linears = [linear for linear, _ in found if linear is not None]
    size, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if len(linears) < len(found) or not _is_silu(mlp.act_fn):
        return None
    if not isinstance(size, int) or size % 2 or not isinstance(scale, float):
        return None
    first, second = rms_norm(parts.input_layernorm), rms_norm(parts.post_attention_layernorm)
    head_norms = None
    if hasattr(attention, "q_norm"):
        of_queries, of_keys = rms_norm(attention.q_norm), rms_norm(attention.k_norm)
        if of_queries is None or of_keys is None or of_queries.epsilon != of_keys.epsilon:
            return None
        if any(norm.weight.shape != (size,) for norm in (of_queries, of_keys)):
            return None
        head_norms = of_queries, of_keys
    if first is None or second is None:
        return None
    query, key, value, output, gate, up, down = linears
    heads = Heads(query.out_features // size, key.out_features // size, size)
    adapters = {linear: adapter for linear, adapter in found if linear is not None and adapter is not None}
    return LayerParts(
        *(first, (query, key, value), head_norms, attention, output, second, (gate, up), down, heads, scale), adapters
    )


def _has_known_names(layer: Any) -> bool:
    def names(module: nn.Module) -> set[str]:
        return {name for name, _ in module.named_children()}

    return (
        names(layer) == _LAYER_PARTS
        and names(layer.self_attn) in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS)
        and names(layer.mlp) == _MLP_PARTS
    )


def rms_norm(module: nn.Module) -> Norm | None:
    """The module as a norm, if it computes just that; which is tried out."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    values = (getattr(module, name, None) for name in _EPSILON_NAMES)
    epsilon = next((float(value) for value in values if isinstance(value, float)), None)
    weight: Any = module.weight
    if epsilon is None or weight.dim() != 1:
        return None
    return Norm(module, epsilon) if _computes_norm(module, weight.detach(), epsilon) else None


@torch.no_grad()
def _is_silu(activation: nn.Module) -> bool:
    probe = torch.linspace(-8, 8, 33)
    return not list(activation.parameters()) and torch.equal(activation(probe), nn.functional.silu(probe))


@torch.no_grad()
def _computes_norm(module: nn.Module, weight: Tensor, epsilon: float) -> bool:
    probe = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
    expected = probe * torch.rsqrt(probe.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    try:
        own: object = module(probe)
    except (RuntimeError, TypeError):
        return False
    return isinstance(own, Tensor) and torch.allclose(own.float(), expected, rtol=1e-5, atol=1e-6)
