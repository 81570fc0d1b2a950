"""A fused norm is the norm; what is another norm keeps its own code."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tailrace.cpu.norms import fuse_norms


def test_values_and_gradients_are_the_modules_own() -> None:
    torch.manual_seed(0)
    own, fused = Qwen3RMSNorm(16), Qwen3RMSNorm(16)
    with torch.no_grad():
        own.weight.normal_()
    fused.load_state_dict(own.state_dict())
    fuse_norms(fused)
    assert "forward" in vars(fused)
    left = (torch.randn(3, 5, 4, 16) * 3).requires_grad_()
    right = left.detach().clone().requires_grad_()
    gradient = torch.randn(3, 5, 4, 16)
    expected, found = own(left), fused(right)
    torch.testing.assert_close(found, expected)
    expected.backward(gradient)
    found.backward(gradient)
    torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fused.weight.grad, own.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_the_type_of_the_result_is_the_modules_own(weights: torch.dtype, inputs: torch.dtype) -> None:
    own, fused = Qwen3RMSNorm(16).to(weights), Qwen3RMSNorm(16).to(weights)
    fuse_norms(fused)
    rows = torch.randn(3, 16).to(inputs)
    torch.testing.assert_close(fused(rows), own(rows), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norm", [Gemma2RMSNorm(16), torch.nn.LayerNorm(16)])
def test_a_norm_that_computes_something_else_is_left_alone(norm: torch.nn.Module) -> None:
    fuse_norms(norm)
    assert "forward" not in vars(norm)
