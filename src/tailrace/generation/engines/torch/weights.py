"""Installs a model state dict in place: checked whole before the first byte is copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from tailrace.errors import ModelError


def install_model_state_dict(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model's own, converting to its types; nothing of `tensors` is kept.

    Weights that share memory (tied embeddings) may come under any or all of their names. Raises `ModelError` for a name
    the model does not know, a wrong shape, or a weight that nothing fills; then no weight was touched.
    """
    own = model.state_dict()
    unknown = sorted(set(tensors) - set(own))
    if unknown:
        raise ModelError(f"the model state dict names weights that the model lacks: {_some(unknown)}")
    misshapen = [name for name in tensors if tensors[name].shape != own[name].shape]
    if misshapen:
        name = misshapen[0]
        raise ModelError(
            f"weight {name} has shape {list(tensors[name].shape)} in the model state dict and "
            f"{list(own[name].shape)} in the model"
        )
    filled = {own[name].data_ptr() for name in tensors}
    missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in filled)
    if missing:
        raise ModelError(f"the model state dict lacks weights of the model: {_some(missing)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
