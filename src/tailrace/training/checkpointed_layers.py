"""Activations of decoder layers computed twice instead of kept.

Transformers' own switch for it works in training mode alone, and a policy is trained in evaluation mode, without
dropout. So each layer's forward is wrapped here, after everything else that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tailrace.errors import ModelError


def checkpoint_layers(model: nn.Module) -> int:
    """Keep no activations inside of a decoder layer; returns how many layers there are.

    Raises `ModelError` for a model whose layers are not such as transformers could checkpoint either.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that can be checkpointed: leave it "
            "off"
        )
    for layer in layers:
        layer.forward = partial(_forward, layer.forward)
    return len(layers)


def _forward(own: Callable[..., Tensor], *inputs: Any, **arguments: Any) -> Tensor:
    """As transformers calls a layer. There is no randomness whose state would have to be kept."""
    run = partial(own, **arguments)
    if not torch.is_grad_enabled():
        return run(*inputs)
    output: Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
