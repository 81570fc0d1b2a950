"""Linear layers give the same outputs and gradients by the faster product."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tailrace.training.onednn_linear import speed_up_linears


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
