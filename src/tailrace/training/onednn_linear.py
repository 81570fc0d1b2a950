"""Matrix products of float32 linear layers by oneDNN, on processors where torch's own choice (MKL) is slower.

On AMD's with AVX-512 outputs take 12 to 19 % less time and gradients of inputs about 10 %; gradients of weights gain
nothing and stay with torch. Which processors gain says `generation.engines.onednn`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailrace.generation.engines.onednn import fill, gains_in_float32, product

_PROBE_ROWS = 32


def speed_up_linears(model: nn.Module) -> int:
    """Give every plain linear layer without bias the faster product; returns how many there were."""
    changed = 0
    if gains_in_float32():
        for module in model.modules():
            if type(module) is nn.Linear and _has_no_bias(module) and _agrees(module.weight):
                module.forward = partial(_forward, module)  # type: ignore[method-assign]
                changed += 1
    return changed


def _has_no_bias(module: nn.Module) -> bool:
    return [name for name, _ in module.named_parameters()] == ["weight"]


@torch.no_grad()
def _agrees(weight: Tensor) -> bool:
    """Whether both products of a few rows are what torch computes."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    for matrix in (weight, weight.t()):
        probe = torch.randn(_PROBE_ROWS, matrix.shape[1], generator=generator)
        expected = probe @ matrix.t()
        tolerance = 1e-5 * float(expected.abs().max())
        if not torch.allclose(product(probe, matrix), expected, rtol=1e-5, atol=tolerance):
            return False
    return True


def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu") or inputs.dtype is not torch.float32:
        return F.linear(inputs, module.weight)
    return _linear(inputs.flatten(0, -2), module.weight).view(*inputs.shape[:-1], module.out_features)


def fast_product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [num_rows, inputs] times the transpose of `matrix` [outputs, inputs], by whichever is faster here."""
    if rows.dtype is torch.float32 and rows.device.type == "cpu" and _gains():
        return product(rows, matrix, bias)
    if _is_onednns(rows):
        return F.linear(fill(rows), matrix, bias)[: len(rows)]
    return F.linear(rows, matrix, bias)


def outer_product(grads: Tensor, inputs: Tensor) -> Tensor:
    """[outputs, inputs]: the transpose of `grads` [num_rows, outputs] times `inputs` [num_rows, inputs]."""
    if _is_onednns(inputs):
        return fill(grads).t() @ fill(inputs)
    return grads.t() @ inputs


def _is_onednns(rows: Tensor) -> bool:
    """Whether torch itself takes oneDNN's products."""
    return rows.dtype is torch.bfloat16 and rows.device.type == "cpu"


_gains = cache(gains_in_float32)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return product(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0]
        return (
            product(grad, weight.t()) if ctx.needs_input_grad[0] else None,
            grad.t() @ inputs if ctx.needs_input_grad[1] else None,
        )


_linear: Callable[[Tensor, Tensor], Tensor] = _Linear.apply
