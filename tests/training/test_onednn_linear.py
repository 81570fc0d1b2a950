"""Linear layers give the same outputs and gradients by the faster product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tailrace.generation.engines.onednn import filled_rows
from tailrace.training.onednn_linear import fast_product, outer_product, speed_up_linears


def test_outputs_and_gradients_are_those_of_the_plain_layer() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias=False), nn.SiLU(), nn.Linear(40, 8, bias=False))
    fast = copy.deepcopy(plain)
    speed_up_linears(fast)  # on processors that gain nothing it changes nothing
    inputs = torch.randn(1, 13, 24)
    results = []
    for model in (plain, fast):
        given = inputs.clone().requires_grad_()
        output = model(given)
        output.square().sum().backward()
        results.append([output, given.grad, *(parameter.grad for parameter in model.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_with_a_bias_and_other_types_keep_their_own_product() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    assert speed_up_linears(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 67, 129])
def test_rows_filled_up_change_no_product(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, grads, matrix = (torch.randn(count, 24).to(dtype) for count in (num_rows, num_rows, 40))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(fast_product(rows, matrix), rows @ matrix.t(), **tolerance)
    torch.testing.assert_close(outer_product(grads, rows), grads.t() @ rows, **tolerance)


def test_programs_are_written_for_few_numbers_of_rows() -> None:
    assert len({filled_rows(count) for count in range(1, 4097)}) < 170
    assert all(count <= filled_rows(count) <= max(count + 7, 1.04 * count) for count in range(1, 4097))
