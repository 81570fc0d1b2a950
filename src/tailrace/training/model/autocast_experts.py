"""Expert matrices in the type of autocast, as every linear layer's are.

Transformers multiplies all experts of a layer in one grouped product, which torch's autocast does not know: matrices
stay float32, and the product takes several times as long as in bfloat16 and rounds otherwise than the generator's.
`autocast_experts` casts them first, then calls transformers' own implementation. Gradients are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTOCAST_EXPERTS = "tailrace_autocast"
"""Name of this implementation in transformers' interface (`model.set_experts_implementation`)."""


def cast_experts_under_autocast(model: PreTrainedModel) -> None:
    """Replace transformers' grouped product of experts, if the model uses it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if "grouped_mm" in model.get_experts_implementation().values():
        ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, autocast_experts)
        model.set_experts_implementation(AUTOCAST_EXPERTS)


def autocast_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[num_tokens, hidden_size]: the experts' outputs, weighted and summed, as transformers' interface asks for it."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden_states.device.type
    experts = _Cast(module, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output


class _Cast:
    """A module with its parameters cast to another type."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> object:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value
