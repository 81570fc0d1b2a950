"""Adapters beside linear layers, as peft makes them, for layers that native passes compute: W x + scale · B A x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.cpu.linears import trained_products


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBeside:
    """What one linear layer has beside it."""

    layer: Any
    """peft's own, by which it is switched off."""
    down: nn.Linear
    """A, [rank, inputs]."""
    up: nn.Linear
    """B, [outputs, rank]."""
    scale: float


def parted(layer: nn.Module) -> tuple[nn.Linear | None, AdapterBeside | None]:
    """A plain linear layer and what is beside it. No layer for anything else, other kinds of adapters among it."""
    if type(layer) is nn.Linear:
        return layer, None
    peft: Any = layer
    base, names = getattr(peft, "base_layer", None), getattr(peft, "active_adapters", [])
    if type(base) is not nn.Linear or len(names) != 1 or names[0] not in getattr(peft, "lora_A", {}):
        return None, None
    name = names[0]
    down, up = peft.lora_A[name], peft.lora_B[name]
    is_usual = (
        all(type(one) is nn.Linear and one._parameters["bias"] is None for one in (down, up))
        and isinstance(peft.lora_dropout[name], nn.Identity)
        and not peft.lora_variant
        and not peft.merged
    )
    return (base, AdapterBeside(peft, down, up, float(peft.scaling[name]))) if is_usual else (None, None)


def add_adapters(
    outputs: Tensor, inputs: Tensor, linears: Sequence[nn.Linear], beside: Sequence[AdapterBeside | None]
) -> Tensor:
    """`outputs` [rows, sum of outputs] of linear layers that share `inputs`, and what is beside these.

    All of a layer's adapters are on, or none.
    """
    on = [one for one in beside if one is not None and not one.layer.disable_adapters]
    if not on:
        return outputs
    inner = iter(
        torch.split(trained_products(inputs, *(one.down for one in on)), [one.down.out_features for one in on], 1)
    )
    added = [
        outputs.new_zeros(len(outputs), linear.out_features)
        if one is None
        else trained_products(next(inner).contiguous() * one.scale, one.up)
        for linear, one in zip(linears, beside, strict=True)
    ]
    return outputs + (added[0] if len(added) == 1 else torch.cat(added, 1))
