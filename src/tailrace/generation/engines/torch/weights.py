"""New weights for a model whose matrices are packed: packed beside generation, so that installing is an exchange.

A matrix that is packed is not kept plain. While a load is on its way there are two packed sets, the old and the new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tailrace.generation.engines.prefetch import StagingBuffers
from tailrace.models.state_dicts import StateDictLayout

if TYPE_CHECKING:
    from tailrace.cpu.engine import EngineAcceleration
    from tailrace.cpu.linears import Packed


class PreparedModelStateDict(dict[str, Tensor]):
    """The weights that are copied when they are installed, and the packed ones that change hands."""

    def __init__(self, tensors: Mapping[str, Tensor], packed: list[Packed]) -> None:
        super().__init__(tensors)
        self.packed = packed
        """Once installed, what they replaced: whoever drops the last reference to this frees it."""


class ModelWeights:
    """The weights of a model. Plain copies of those that an acceleration computes with are dropped."""

    def __init__(self, model: nn.Module, acceleration: EngineAcceleration | None) -> None:
        self._layout, self._acceleration = StateDictLayout(model), acceleration
        self._staging = StagingBuffers(next(model.parameters()).device)
        own = model.state_dict(keep_vars=True)
        self._names = {id(own[name]): name for name in reversed(own)}  # the first of tied names, as in the layout
        taken_over = set() if acceleration is None else acceleration.taken_over
        others = [module for module in model.modules() if module not in taken_over]
        kept = {id(tensor) for module in others for tensor in (*module._parameters.values(), *module._buffers.values())}
        self._plain = {name: own[name] for key, name in self._names.items() if key in kept}
        for name in self._names.values():
            if name not in self._plain:
                own[name].data = own[name].new_empty(0)

    def prepare(self, tensors: Mapping[str, Tensor]) -> PreparedModelStateDict:
        """Check and pack. Raises `ModelError` for a state dict that is not this model's, as `StateDictLayout` does."""
        named = self._layout.checked(tensors)
        plain = {name: named[name] for name in self._plain}
        packed = []
        if self._acceleration is not None:
            packed = self._acceleration.pack(lambda weight: named[self._names[id(weight)]])
        return PreparedModelStateDict(self._staging.fill(plain), packed)

    @torch.no_grad()
    def install(self, prepared: PreparedModelStateDict) -> None:
        """Nothing of `prepared` but what is packed is kept."""
        for name, tensor in self._plain.items():
            tensor.copy_(prepared[name], non_blocking=True)
        self._staging.wait_until_copied()
        if self._acceleration is not None:
            prepared.packed = self._acceleration.exchange(prepared.packed)
