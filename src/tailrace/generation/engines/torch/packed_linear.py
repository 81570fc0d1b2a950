"""Linear layers over weights in oneDNN's own layout: laid out once per policy version instead of once per product.

Decoding multiplies few rows by the same matrices again and again; with 128 rows a product takes 10 to 20 % less time
than over plain weights. The price is a second copy of the matrices. Only on a CPU, and only where the processor gains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailrace.generation.engines.onednn import filled_rows, gains_packed, product

_PROBE_ROWS = 32
_USUAL_ROWS = 64


class Packed(NamedTuple):
    """Weights in the layout that a product wants."""

    matrix: Tensor
    """[outputs, inputs]"""
    bias: Tensor | None
    """[outputs]"""

    @property
    def kind(self) -> tuple[torch.Size, torch.dtype, bool]:
        """Products that have it in common share their programs."""
        return self.matrix.shape, self.matrix.dtype, self.bias is None


@torch.inference_mode()
def write_programs(linears: Iterable[JoinedLinear]) -> None:
    """Have oneDNN write its programs for the numbers of rows that any engine meets, before there is work."""
    for matrix, bias in {packed.kind: packed for linear in linears if (packed := linear.packed)}.values():
        for count in sorted({filled_rows(count) for count in range(1, _USUAL_ROWS + 1)}):
            product(torch.zeros(count, matrix.shape[1], dtype=matrix.dtype), matrix, bias)


class JoinedLinear:
    """Linear layers that share their input, as one product: [rows, sum of outputs]. Packed where that gains."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.modules = modules
        self._packs = gains_packed(modules[0].weight.dtype)
        self._dtype = modules[0].weight.dtype
        self._now = self.pack(lambda parameter: parameter)

    @torch.inference_mode()
    def pack(self, new: Callable[[Tensor], Tensor]) -> Packed:
        """Lay out the `new` values of the layers' parameters. In any thread; `exchange` takes the result."""
        weights = [new(module.weight).detach().to(self._dtype) for module in self.modules]
        matrix, bias = weights[0] if len(weights) == 1 and self._packs else torch.cat(weights), None
        if any(module.bias is not None for module in self.modules):
            bias = torch.cat([self._bias_of(module, new) for module in self.modules])
        return Packed(_pack(matrix) if self._packs else matrix, bias)

    def exchange(self, packed: Packed) -> Packed:
        """Compute with these weights from now on; returns those of before."""
        before, self._now = self._now, packed
        return before

    @property
    def packed(self) -> Packed | None:
        """What oneDNN computes with; None where it does not."""
        return self._now if self._packs else None

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [rows, inputs] are of the weights' dtype."""
        if self._packs:
            return product(rows, *self._now)
        return nn.functional.linear(rows, *self._now)

    def _bias_of(self, module: nn.Linear, new: Callable[[Tensor], Tensor]) -> Tensor:
        bias: Tensor | None = module.bias
        if bias is None:
            return torch.zeros(module.out_features, dtype=self._dtype)
        return new(bias).detach().to(self._dtype)


class PackedLinears:
    """The packed copies of a model's linear layers, whose `forward` they replace."""

    def __init__(self, model: nn.Module, *, leave: Collection[nn.Linear] = ()) -> None:
        self._rounded = _Rounded()
        linears = [module for module in model.modules() if type(module) is nn.Linear and module not in leave]
        self.joined = [JoinedLinear([module]) for module in linears if _qualifies(module)]
        for joined in self.joined:
            (module,) = joined.modules
            module.forward = partial(self._forward, joined, module.weight.dtype)  # type: ignore[method-assign]

    def forget_inputs(self) -> None:
        """Let go of what the last forward pass left behind."""
        self._rounded.clear()

    def _forward(self, joined: JoinedLinear, dtype: torch.dtype, inputs: Tensor) -> Tensor:
        rows = self._rounded.to(inputs, dtype).flatten(0, -2)
        return joined(rows).view(*inputs.shape[:-1], -1)


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
        own_bias: Tensor | None = module.bias
        bias = None if own_bias is None else own_bias.to(weight.dtype)
        expected = nn.functional.linear(probe, weight, bias).float()
        found = product(probe, _pack(weight), bias).float()
        tolerance = (1e-5 if weight.dtype is torch.float32 else 2e-2) * float(expected.abs().max())
        return bool(torch.allclose(found, expected, rtol=0, atol=tolerance))


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed
