"""New weights for a model whose matrices are packed: packed beside generation, so that installing is an exchange.

A matrix that is packed is not kept plain. While a load is on its way there are two packed sets, the old and the new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tailrace.generation.engines.prefetch import prefetch_tensors
from tailrace.generation.engines.torch.packed_linear import JoinedLinear, Packed
from tailrace.models.state_dicts import StateDictLayout


class PreparedModelStateDict(dict[str, Tensor]):
    """The weights that are copied when they are installed, and the packed ones that change hands."""

    def __init__(self, tensors: Mapping[str, Tensor], packed: list[Packed]) -> None:
        super().__init__(tensors)
        self.packed = packed
        """Once installed, what they replaced: whoever drops the last reference to this frees it."""


class ModelWeights:
    """The weights of a model, some of which `joined` computes with instead; plain copies of those are dropped."""

    def __init__(self, model: nn.Module, joined: Sequence[JoinedLinear]) -> None:
        self._layout, self._joined = StateDictLayout(model), joined
        own = model.state_dict(keep_vars=True)
        self._names = {id(own[name]): name for name in reversed(own)}  # the first of tied names, as in the layout
        packed = {id(weight) for linear in joined for module in linear.modules for weight in module.parameters()}
        taken_over = {module for linear in joined for module in linear.modules}
        others = (module for module in model.modules() if module not in taken_over)
        needed = {id(weight) for module in others for weight in module.parameters(recurse=False)}
        self._plain = {name: own[name] for key, name in self._names.items() if key not in packed or key in needed}
        for name in self._names.values():
            if name not in self._plain:
                own[name].data = own[name].new_empty(0)

    def prepare(self, tensors: Mapping[str, Tensor]) -> PreparedModelStateDict:
        """Check and pack. Raises `ModelError` for a state dict that is not this model's, as `StateDictLayout` does."""
        named = self._layout.checked(tensors)
        plain = {name: named[name] for name in self._plain}
        prefetch_tensors(plain)
        packed = [linear.pack(lambda weight: named[self._names[id(weight)]]) for linear in self._joined]
        return PreparedModelStateDict(plain, packed)

    @torch.no_grad()
    def install(self, prepared: PreparedModelStateDict) -> None:
        """Nothing of `prepared` but what is packed is kept."""
        for name, tensor in self._plain.items():
            tensor.copy_(prepared[name])
        pairs = zip(self._joined, prepared.packed, strict=True)
        prepared.packed = [linear.exchange(packed) for linear, packed in pairs]
