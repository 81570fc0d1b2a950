"""The default loss is what its docstring says, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.training.losses import LossTokens
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.settings.losses import ClippedRatioSettings

SETTINGS = ClippedRatioSettings(clip_low=0.2, clip_high=0.3, truncation=2.0)
LOSS = ClippedRatio(SETTINGS)


def one_token(logprob: float, advantage: float) -> LossTokens:
    one = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int32)
    return LossTokens(zero.long(), one * logprob, one * advantage, one, zero, torch.tensor([0, 1]))


def weight(ratio: float, advantage: float) -> float:
    """-d loss / d logprob over the advantage: the importance weight that the token got."""
    tokens = one_token(-1.0, advantage)
    _, derivative, kept = LOSS.with_derivative(torch.tensor([ratio]).log() - 1.0, tokens)
    assert kept.all()
    return float(-derivative / advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, 1.0),
        (1.25, 1.0, 1.25),
        (1.35, 1.0, 0.0),  # clipped: likely enough already
        (0.5, 1.0, 0.5),
        (0.75, -1.0, 0.0),  # clipped: unlikely enough already
        (0.85, -1.0, 0.85),
        (1.5, -1.0, 1.5),
        (5.0, -1.0, 2.0),  # truncated
    ],
)
def test_weights_are_the_clipped_and_truncated_ratio(ratio: float, advantage: float, expected: float) -> None:
    assert weight(ratio, advantage) == pytest.approx(expected, abs=1e-6)


@given(st.floats(-12, 0), st.floats(-12, 0), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_no_weight_leaves_its_bounds(logprob: float, sampled: float, advantage: float) -> None:
    tokens = one_token(sampled, advantage)
    loss, derivative, _ = LOSS.with_derivative(torch.tensor([logprob]), tokens)
    assert 0 <= float(-derivative / advantage) <= SETTINGS.truncation + 1e-6
    assert abs(float(loss)) <= SETTINGS.truncation * abs(advantage) + 1e-6


@given(st.floats(0.4, 1.9), st.sampled_from([-1.5, 0.7]))
def test_below_truncation_the_derivative_is_ppos(ratio: float, advantage: float) -> None:
    tokens = one_token(-1.0, advantage)
    logprob = (torch.tensor([ratio], dtype=torch.float64).log() - 1.0).requires_grad_()
    value = (logprob + 1.0).exp()
    surrogate = torch.minimum(value * advantage, value.clamp(0.8, 1.3) * advantage)
    (expected,) = torch.autograd.grad(-surrogate.sum(), logprob)
    _, derivative, _ = LOSS.with_derivative(logprob.detach(), tokens)
    if min(abs(ratio - 0.8), abs(ratio - 1.3)) > 1e-3:
        torch.testing.assert_close(derivative, expected, check_dtype=False, rtol=1e-5, atol=1e-6)


def test_a_truncation_below_the_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="truncation"):
        ClippedRatioSettings(clip_high=2.0, truncation=1.5)
