"""How peft writes an adapter (LoRA): names of its files, and of the two matrices that stand beside a layer.

base_model.model.model.layers.0.mlp.up_proj.lora_A.weight    [rank, inputs]     down
base_model.model.model.layers.0.mlp.up_proj.lora_B.weight    [outputs, rank]    up
"""

from __future__ import annotations

from typing import Final

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def names_beside(layer: str) -> tuple[str, str]:
    """Of the matrices down and up beside a layer of the model.

    >>> names_beside("layers.0.up_proj")
    ('base_model.model.layers.0.up_proj.lora_A.weight', 'base_model.model.layers.0.up_proj.lora_B.weight')
    """
    return f"{_BEFORE}{layer}{_DOWN}", f"{_BEFORE}{layer}{_UP}"


def layer_of(name: str) -> str:
    """The layer that a matrix stands beside.

    >>> [layer_of(name) for name in names_beside("layers.0.up_proj")]
    ['layers.0.up_proj', 'layers.0.up_proj']
    """
    return name.removeprefix(_BEFORE).removesuffix(_DOWN).removesuffix(_UP)


def is_down(name: str) -> bool:
    """Whether a tensor of a model state dict is an adapter's first matrix; no model's own weight is called so.

    >>> [is_down(name) for name in (*names_beside("layers.0.up_proj"), "layers.0.up_proj.weight")]
    [True, False, False]
    """
    return name.endswith(_DOWN)
