"""Linear layers give the same outputs and gradients by the faster product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tailrace.cpu import products
from tailrace.cpu.linears import speed_up_linears
from tailrace.cpu.products import add_outer_product, fast_product, filled_rows, outer_product


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_plain_layer(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias))
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


def test_layers_of_other_types_keep_their_own_product() -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    speed_up_linears(layer)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 67, 129])
def test_rows_filled_up_change_no_product(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, grads, matrix = (torch.randn(count, 24).to(dtype) for count in (num_rows, num_rows, 40))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(fast_product(rows, matrix), rows @ matrix.t(), **tolerance)
    torch.testing.assert_close(outer_product(grads, rows), grads.t() @ rows, **tolerance)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("num_rows", [5, 128, 700, 2691])
def test_outer_products_in_blocks_are_the_same(
    num_rows: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "gains_in_outer_products", lambda: True)
    monkeypatch.setattr(products, "_BLOCK_VALUES", 7 * shape[1])
    torch.manual_seed(0)
    grads, inputs = (torch.randn(num_rows, size) for size in shape)
    expected = grads.t() @ inputs
    torch.testing.assert_close(outer_product(grads, inputs), expected, rtol=1e-4, atol=1e-4)
    total = torch.ones(shape)
    add_outer_product(total, grads, inputs)
    torch.testing.assert_close(total, expected + 1, rtol=1e-4, atol=1e-4)


def test_programs_are_written_for_few_numbers_of_rows() -> None:
    assert len({filled_rows(count) for count in range(1, 4097)}) < 170
    assert all(count <= filled_rows(count) <= max(count + 7, 1.04 * count) for count in range(1, 4097))
