"""What a model state dict of one model must hold: checked whole before the first byte is copied."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tailrace.errors import ModelError

_EXPERT_OF_A_FILE = re.compile(r"\.experts\.\d+\.")
_FROM_ITS_FILES = (
    ". Its files have a tensor for each expert, and the model one for all of a layer: save it by its own names "
    "(model.save_pretrained(folder, save_original_format=False))"
)


class StateDictLayout:
    """Names and shapes of a model's weights, and which names are tied. Make it while every weight has its shape."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._first_names: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._shapes[name] = tensor.shape
            self._first_names[name] = first.setdefault(id(tensor), name)

    def shape_of(self, name: str) -> torch.Size:
        """Raises `ModelError` for a name that the model does not know."""
        if name not in self._shapes:
            raise ModelError(f"the model has no weight {name}")
        return self._shapes[name]

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One tensor per weight, under the first of its names; tied weights may come under any or all of theirs.

        Raises `ModelError` for a name the model does not know, a wrong shape, or a weight that nothing fills.
        """
        unknown = sorted(set(tensors) - set(self._shapes))
        if unknown:
            hint = _FROM_ITS_FILES if any(map(_EXPERT_OF_A_FILE.search, unknown)) else ""
            raise ModelError(f"the model state dict names weights that the model lacks: {_some(unknown)}{hint}")
        for name, tensor in tensors.items():
            if tensor.shape != self._shapes[name]:
                raise ModelError(
                    f"weight {name} has shape {list(tensor.shape)} in the model state dict and "
                    f"{list(self._shapes[name])} in the model"
                )
        named = {self._first_names[name]: tensor for name, tensor in tensors.items()}
        missing = sorted(set(self._first_names.values()) - set(named))
        if missing:
            raise ModelError(f"the model state dict lacks weights of the model: {_some(missing)}")
        return named


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
