"""Expert matrices in the type of autocast, as every linear layer's are.

Transformers multiplies all experts of a layer in one grouped product, which torch's autocast does not know: under it
the matrices stay float32, and the product takes several times as long as in bfloat16 and rounds otherwise than the
generator's. `autocast_experts` is transformers' own implementation over matrices that were cast first. Gradients are
float32, as under autocast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTOCAST_EXPERTS = "tailrace_autocast"
"""Name of this implementation in transformers' interface (`model.set_experts_implementation`)."""

_GROUPED = "grouped_mm"
"""Transformers' implementation that it stands on, and the one that it replaces."""


def cast_experts_under_autocast(model: PreTrainedModel) -> bool:
    """Give a model whose experts are multiplied in groups the implementation of this module; whether it has any."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if _GROUPED not in model.get_experts_implementation().values():
        return False
    ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, autocast_experts)
    model.set_experts_implementation(AUTOCAST_EXPERTS)
    return True


def autocast_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[num_tokens, hidden_size]: the experts' outputs, weighted and summed, as transformers' interface asks for it."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden_states.device.type
    experts = _Cast(module, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output


class _Cast:
    """A module whose parameters are of another type, and whose everything else is its own."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> object:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value
