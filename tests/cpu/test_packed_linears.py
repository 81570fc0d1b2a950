"""Linear layers over packed weights give what the plain ones give, and follow new weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tailrace.cpu.linears import PackedLinears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_the_plain_layers_under_their_present_weights(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias)).to(dtype)
    plain.requires_grad_(False)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    packed = copy.deepcopy(plain)
    linears = PackedLinears(packed)  # on processors that gain nothing it changes nothing
    for _ in range(2):
        for rows in (1, 5, 130):
            inputs = torch.randn(rows, 24, dtype=dtype)
            torch.testing.assert_close(packed(inputs), plain(inputs), rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(packed.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs.normal_())
        for joined in linears.joined:
            joined.exchange(joined.pack(lambda parameter: parameter))


def test_subclasses_keep_their_own_product() -> None:
    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    assert not PackedLinears(nn.Sequential(Doubled(8, 8))).joined
