"""The routers of a mixture-of-experts model: which modules they are, and what they answer.

A router of transformers is a module whose class is called `...TopKRouter`. It takes the hidden states of all tokens and
returns logits [num_tokens, num_experts], weights [num_tokens, top_k] and experts [num_tokens, top_k]. Each candidate is
probed with random numbers; one that answers otherwise is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_ROUTER_CLASS = re.compile(r"TopKRouter$", re.IGNORECASE)
_LAYER = re.compile(r"\.(\d+)\.")
_PROBE_TOKENS = 4


class Routing(NamedTuple):
    """What a router answers; its fields are those of the module's docstring."""

    logits: Tensor
    weights: Tensor
    experts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """One router of a model."""

    name: str
    """In the model, as in `model.layers.3.mlp.gate`."""
    module: nn.Module
    layer: int
    """Number of its layer among all of the model's, those without experts included."""
    num_experts: int
    top_k: int


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of `model`, in the order of its layers; none in a model without experts."""
    found = [
        _router(name, module, index)
        for index, (name, module) in enumerate(
            pair for pair in model.named_modules() if _ROUTER_CLASS.search(type(pair[1]).__name__)
        )
    ]
    return [router for router in found if router is not None]


@torch.no_grad()
def probe_router(module: nn.Module) -> Routing | None:
    """What a router says of a few random tokens; None where that is not what routers answer."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_TOKENS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    try:
        answer: object = module(hidden)
    except (RuntimeError, TypeError, ValueError):
        return None
    return as_routing(answer)


def as_routing(answer: object) -> Routing | None:
    """The answer of a router, if it is that of one."""
    if not isinstance(answer, tuple) or len(answer) != 3 or not all(isinstance(part, Tensor) for part in answer):
        return None
    routing = Routing(*answer)
    whole = not routing.experts.dtype.is_floating_point
    same = routing.weights.shape == routing.experts.shape and routing.logits.shape[:1] == routing.experts.shape[:1]
    return routing if whole and same and routing.experts.dim() == routing.logits.dim() == 2 else None


def index_dtype(num_experts: int, top_k: int) -> type[np.uint8] | type[np.uint16]:
    """The narrowest type for indices of experts: its greatest number, in all of a token's places, means unknown.

    So 256 experts fit a byte, unless a token has one alone.

    >>> index_dtype(128, 8).__name__, index_dtype(256, 8).__name__, index_dtype(256, 1).__name__
    ('uint8', 'uint8', 'uint16')
    """
    return np.uint8 if num_experts + (top_k == 1) <= 256 else np.uint16


def _router(name: str, module: nn.Module, index: int) -> Router | None:
    routing = probe_router(module)
    if routing is None:
        return None
    layer = _LAYER.search(f".{name}.")
    return Router(
        name,
        module,
        layer=int(layer[1]) if layer else index,
        num_experts=routing.logits.shape[1],
        top_k=routing.experts.shape[1],
    )
