"""Activations of decoder layers computed twice instead of kept.

Transformers' own switch for it needs training mode, and a policy is trained in evaluation mode, without dropout. So
each layer's forward is wrapped, after everything else that replaces it.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from tailrace.errors import ModelError


def checkpoint_layers(model: nn.Module) -> int:
    """Keep no activations inside of decoder layers; returns how many there are.

    Raises `ModelError` for a model whose layers transformers could not checkpoint either.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that can be checkpointed: leave it "
            "off"
        )
    for layer in layers:
        # Without dropout there is no random state to preserve.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return len(layers)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers knows as such, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
