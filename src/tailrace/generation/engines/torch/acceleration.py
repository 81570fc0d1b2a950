"""Where the torch engine asks for speed on a CPU; it runs without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from tailrace.generation.engines.torch.cache import LayerShape

if TYPE_CHECKING:
    from tailrace.cpu.engine import EngineAcceleration


def accelerate(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    *,
    native_kernels: bool,
    is_unchanged: Callable[[], bool],
) -> EngineAcceleration | None:
    """Speed up a model that lies on a CPU; None for another, and where `tailrace.cpu` is missing or switched off."""
    if model.device.type != "cpu":
        return None
    try:
        from tailrace.cpu.engine import speed_up_engine
    except ImportError:
        return None
    heads = [(layer.heads, layer.kv_heads) for layer in layers]
    return speed_up_engine(model, heads, dtype, native_kernels=native_kernels, is_unchanged=is_unchanged)
