"""Activations of decoder layers computed twice instead of kept.

Transformers' own switch for it needs training mode, and a policy is trained in evaluation mode, without dropout. So
each layer's forward is wrapped, after everything else that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tailrace.errors import ModelError
from tailrace.training.model.offloaded_activations import OffloadedActivations


def checkpoint_layers(model: nn.Module, *, offload_from: torch.device | None = None) -> None:
    """Keep no activations inside of decoder layers.

    What they keep are their inputs, those of the GPU `offload_from` in the host's memory. Raises `ModelError` for a
    model whose layers transformers could not checkpoint either.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that can be checkpointed: leave it "
            "off"
        )
    offloaded = None if offload_from is None else OffloadedActivations(offload_from)
    for layer in layers:
        # Without dropout there is no random state to preserve.
        own = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = own if offloaded is None else partial(_within, offloaded, own)


def _within(context: AbstractContextManager[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context:
        return forward(*args, **kwargs)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers knows as such, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
