"""Root-mean-square norms in half the passes over memory, with a gradient written out.

y = x / rms(x) · w,   rms(x) = sqrt(mean(x²) + ε)                  (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)
dx = (g·w - x̂ · mean(g·w·x̂)) / rms(x),   dw = Σ g·x̂,   x̂ = x / rms(x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.cpu.layers import rms_norm


def fuse_norms(model: nn.Module) -> None:
    """Give every norm that computes just this its fused forward."""
    for module in model.modules():
        norm = rms_norm(module)
        if norm is not None:
            module.forward = partial(_forward, module, norm.epsilon)


def _forward(module: nn.Module, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return _norm(hidden_states, weight, epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normed: Tensor = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        ctx.dtype = x.dtype
        return (normed * weight).to(torch.promote_types(x.dtype, weight.dtype))  # as transformers' norms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        products = (grads[0] * normed).flatten(0, -2)
        grad_weight = products.sum(0)
        means = torch.mv(products, weight).view(inverse.shape).div_(weight.shape[0])
        grad = (grads[0] * weight).addcmul_(normed, means, value=-1).mul_(inverse)
        return grad.to(ctx.dtype), grad_weight, None


_norm: Callable[[Tensor, Tensor, float], Tensor] = _Norm.apply
