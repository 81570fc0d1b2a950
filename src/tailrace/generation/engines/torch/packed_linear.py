"""Linear layers over weights in oneDNN's own layout: laid out once per policy version instead of once per product.

Decoding multiplies few rows by the same matrices again and again; with 128 rows a product takes 10 to 20 % less time
than over plain weights. The price is a second copy of the matrices. Only on a CPU, and only where the processor gains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailrace.generation.engines.onednn import filled_rows, gains_packed, product

_PROBE_ROWS = 32
_USUAL_ROWS = 64


class Product(NamedTuple):
    """What one kind of program computes."""

    matrix: Tensor
    """[outputs, inputs]"""
    bias: Tensor | None

    @property
    def kind(self) -> tuple[torch.Size, torch.dtype, bool]:
        """Products of a model that have it in common share their programs."""
        return self.matrix.shape, self.matrix.dtype, self.bias is None


@torch.inference_mode()
def write_programs(products: Iterable[Product]) -> None:
    """Have oneDNN write its programs for the numbers of rows that any engine meets, before there is work."""
    for matrix, bias in {made.kind: made for made in products}.values():
        for count in sorted({filled_rows(count) for count in range(1, _USUAL_ROWS + 1)}):
            product(torch.zeros(count, matrix.shape[1], dtype=matrix.dtype), matrix, bias)


class PackedLinears:
    """The packed copies of a model's linear layers, whose `forward` they replace.

    `repack` brings them up to date with the plain weights; without it they are those of the time of construction.
    """

    def __init__(self, model: nn.Module, *, leave: Collection[nn.Linear] = ()) -> None:
        self._rounded = _Rounded()
        linears = [module for module in model.modules() if type(module) is nn.Linear and module not in leave]
        self._packed = [_Packed(module, self._rounded) for module in linears if _qualifies(module)]

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def products(self) -> Sequence[Product]:
        """Of all layers."""
        return [packed.product for packed in self._packed]

    def repack(self) -> None:
        """Lay out the present weights."""
        for packed in self._packed:
            packed.repack()

    def forget_inputs(self) -> None:
        """Let go of what the last forward pass left behind."""
        self._rounded.clear()


class JoinedLinear:
    """Linear layers that share their input, as one product: [rows, sum of outputs]. Packed where that gains."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._modules = modules
        self._packs = gains_packed(modules[0].weight.dtype)
        self.repack()

    @torch.inference_mode()
    def repack(self) -> None:
        """Lay out the present weights."""
        weight = torch.cat([module.weight for module in self._modules])
        self._weight = _pack(weight) if self._packs else weight
        self._bias = None
        if any(module.bias is not None for module in self._modules):
            self._bias = torch.cat([_bias_of(module) for module in self._modules]).to(weight.dtype)

    @property
    def products(self) -> Sequence[Product]:
        """Its own, where it is packed."""
        return [Product(self._weight, self._bias)] if self._packs else []

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [rows, inputs] are of the weights' dtype."""
        if self._packs:
            return product(rows, self._weight, self._bias)
        return nn.functional.linear(rows, self._weight, self._bias)


def _bias_of(module: nn.Linear) -> Tensor:
    bias: Tensor | None = module.bias
    return module.weight.new_zeros(module.out_features) if bias is None else bias


class _Packed:
    """One layer. It keeps its shape of input, in its weight's dtype."""

    def __init__(self, module: nn.Linear, rounded: _Rounded) -> None:
        self._module, self._rounded = module, rounded
        self._weight = torch.empty(0)
        self.repack()
        module.forward = self.forward  # type: ignore[method-assign, assignment]

    def repack(self) -> None:
        self._weight = _pack(self._module.weight)

    @property
    def product(self) -> Product:
        return Product(self._weight, self._module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self._rounded.to(inputs, self._module.weight.dtype)
        return product(rows, self._weight, self._module.bias)


class _Rounded:
    """The last input as a product wants it: the projections of one layer are given the same tensor."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._given: Tensor | None = None
        self._result: Tensor | None = None

    def to(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype:
            return tensor
        if self._given is not tensor or self._result is None or self._result.dtype is not dtype:
            self._given, self._result = tensor, tensor.to(dtype)
        return self._result


def _qualifies(module: nn.Linear) -> bool:
    """Whether the layer is a plain one that gains, and its product over packed weights is torch's own."""
    if module.weight.device.type != "cpu" or not gains_packed(module.weight.dtype):
        return False
    with torch.inference_mode():
        weight = module.weight
        probe = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        expected = nn.functional.linear(probe, weight, module.bias).float()
        found = product(probe, _pack(weight), module.bias).float()
        tolerance = (1e-5 if weight.dtype is torch.float32 else 2e-2) * float(expected.abs().max())
        return bool(torch.allclose(found, expected, rtol=0, atol=tolerance))


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed
