"""An engine's layers are computed by native passes where these compute the same, whatever the precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.cpu.build import find_compiler
from tailrace.generation.engines.torch.model import SlotModel
from tests.generation.engine_support import SHAPE

GROUPED = {**SHAPE, "num_key_value_heads": 2}
KNOWN = {
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
}
OTHERS = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "granite": {"residual_multiplier": 0.9},
    "helium": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "ministral3": {"head_dim": 16, "sliding_window": None, "max_position_embeddings": 262_144},
    "gpt2": {},
}

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: make test-system")


def is_fused(name: str, options: dict[str, object], dtype: torch.dtype, initializer_range: float) -> bool:
    torch.manual_seed(0)
    settings = GROUPED | options | {"initializer_range": initializer_range}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split(maxsplit=1)[0], **settings)).to(dtype)
    SlotModel(model)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    fused = {"forward" in vars(layer) for layer in layers}
    assert len(fused) == 1
    return fused.pop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initializer_range", [0.2, 0.02])
@pytest.mark.parametrize("name", KNOWN)
def test_layers_of_the_common_kind_are(name: str, initializer_range: float, dtype: torch.dtype) -> None:
    assert is_fused(name, KNOWN[name], dtype, initializer_range)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initializer_range", [0.2, 0.02])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_compute_something_else_keep_their_own_code(
    name: str, initializer_range: float, dtype: torch.dtype
) -> None:
    """Other pairs of a head are turned, no pairs in some layers, queries grow far out, what is added is scaled."""
    assert not is_fused(name, OTHERS[name], dtype, initializer_range)
