"""Decoder layers compiled by `torch.compile`: once, for rows of any length.

    layer:  norm, projections, positions ─► attention over the row's segments ─► projection, norm, feed-forward
            └──────── compiled ────────┘    └─ as it is: divided anew each row ─┘  └───────── compiled ────────┘

Layers of one shape share what was compiled, in seconds and in the first step. A row of another length takes nothing,
since lengths are symbols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.errors import ModelError
from tailrace.models.routers import find_routers
from tailrace.training.model.checkpointed_layers import decoder_layers
from tailrace.training.rows.attention import PACKED_ATTENTION, packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNCOMPILED_ATTENTION = f"{PACKED_ATTENTION}_beside_compiled_layers"


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the layers of a model, before anything else wraps them.

    Raises `ModelError` for a model whose layers transformers does not know as such, or that has experts: they are given
    other numbers of tokens in each row and layer, and router replay looks on from within.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(model)
    if not layers:
        raise ModelError(f"trainer.compile: {type(model).__name__} has no layers that can be compiled: leave it off")
    if find_routers(model):
        raise ModelError(f"trainer.compile: {type(model).__name__} has experts, which are not compiled: leave it off")
    if model.config._attn_implementation == PACKED_ATTENTION:
        AttentionInterface.register(_UNCOMPILED_ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
        model.set_attn_implementation(_UNCOMPILED_ATTENTION)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
