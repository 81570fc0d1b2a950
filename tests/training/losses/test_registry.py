"""Settings name the loss; one's own is a function in a module."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import SettingsError
from tailrace.training.losses import LOSSES, LossTokens, load_loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.settings import BUILT_IN_LOSSES, LossSettings


def own_loss(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> tuple[torch.Tensor, torch.Tensor]:
    return -logprobs, torch.ones_like(logprobs, dtype=torch.bool)


def test_the_default_is_the_clipped_ratio_with_its_settings() -> None:
    assert load_loss(LossSettings(clip_low=0.1)) == ClippedRatio(LossSettings(clip_low=0.1))
    assert set(LOSSES) == set(BUILT_IN_LOSSES)


def test_a_loss_of_ones_own_is_named_by_module_and_function() -> None:
    assert load_loss(LossSettings(name=f"{__name__}:own_loss")) is own_loss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        ("math:pi", "that is 3.14159.*, not a function"),
    ],
)
def test_losses_that_are_not_to_be_found_are_refused(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_loss(LossSettings(name=name))


@pytest.mark.parametrize("name", ["gspo", "", "my_losses:", ":loss"])
def test_unknown_names_are_refused_with_what_there_is_where_settings_are_read(name: str) -> None:
    with pytest.raises(ValueError, match="must be clipped_ratio, or module:function"):
        LossSettings(name=name)


def test_samples_are_summed_and_spread_back() -> None:
    zeros = torch.zeros(6)
    tokens = LossTokens(
        zeros.long(), zeros, zeros, zeros, zeros.int(), torch.tensor([0, 2, 2, 5, 6]), {"pair": torch.zeros(6, 2)}
    )
    values = torch.arange(6.0, requires_grad=True)
    sums = tokens.sum_by_sample(values)
    assert sums.tolist() == [1.0, 0.0, 9.0, 5.0]
    (gradient,) = torch.autograd.grad((sums * torch.tensor([1.0, 7.0, 2.0, 3.0])).sum(), values)
    assert gradient.tolist() == [1, 1, 2, 2, 2, 3]
    assert tokens.spread(sums).tolist() == [1, 1, 9, 9, 9, 5]
    part = tokens.part(slice(1, 4))
    assert part.sample_offsets.tolist() == [0, 1, 1, 3, 3]
    assert part.columns["pair"].shape == (3, 2)
