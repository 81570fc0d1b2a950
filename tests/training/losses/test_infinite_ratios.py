"""Log-ratios that are not finite are the only ones that losses touch, and alone make no loss or gradient infinite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses import Loss, LossTokens, load_loss
from tailrace.training.losses.composition import compose
from tailrace.training.losses.masks.protocol import Mask
from tailrace.training.losses.ratios import ratios
from tests.training.losses.support import BUILT_IN, as_any_loss, settings_of

GENERATOR = -2.0


def tokens_of(generator: Tensor, advantages: Tensor) -> LossTokens:
    """One sample."""
    count = len(generator)
    return LossTokens(
        targets=torch.zeros(count, dtype=torch.int64),
        logprobs=generator,
        advantages=advantages,
        temperatures=torch.ones(count),
        policy_versions=torch.zeros(count, dtype=torch.int32),
        sample_offsets=torch.tensor([0, count]),
    )


def loss_and_gradient(loss: Loss, policy: Tensor, generator: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    leaf = policy.clone().requires_grad_()
    losses, kept = loss(leaf, torch.ones_like(policy), tokens_of(generator, advantages))
    losses.where(kept, 0.0).sum().backward()
    assert leaf.grad is not None
    return losses.where(kept, 0.0).detach(), leaf.grad


@given(st.floats(-86, 88.5, width=32))
def test_a_ratio_that_is_finite_is_the_plain_exponential(log_ratio: float) -> None:
    policy, generator = torch.tensor([log_ratio]), torch.zeros(1)
    assert torch.equal(ratios(policy, tokens_of(generator, torch.ones(1))), policy.exp())


def test_ratios_that_are_not_finite_are_0_or_the_largest_number_and_nan_stays() -> None:
    policy = torch.tensor([-math.inf, 100.0, GENERATOR, math.nan])
    generator = torch.tensor([GENERATOR, 0.0, -math.inf, GENERATOR])
    impossible, overflowing, never_sampled, unknown = ratios(policy, tokens_of(generator, torch.ones(4))).tolist()
    assert impossible == 0
    assert overflowing == never_sampled == pytest.approx(torch.finfo(torch.float32).max, rel=1e-3)
    assert math.isnan(unknown)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_token_that_the_policy_has_made_impossible_leaves_loss_and_gradient_finite(
    name: str, advantage: float, composed: bool
) -> None:
    """And those of the tokens beside it as they are."""
    chosen = load_loss(settings_of(name))
    loss = as_any_loss(chosen) if composed else chosen
    policy, generator = torch.tensor([-math.inf, GENERATOR]), torch.full((2,), GENERATOR)
    losses, gradient = loss_and_gradient(loss, policy, generator, torch.full((2,), advantage))
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()
    if name not in {"gspo"}:  # whose ratio is one of both
        alone = loss_and_gradient(loss, policy[1:], generator[1:], torch.full((1,), advantage))
        weight = 2 if settings_of(name).denominator == "sequences" else 1
        assert losses[1] * weight == alone[0][0]
        assert gradient[1] * weight == alone[1][0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_token_that_the_generator_called_impossible_gives_no_nan(name: str, advantage: float) -> None:
    losses, gradient = loss_and_gradient(
        load_loss(settings_of(name)), torch.tensor([-1.0]), torch.tensor([-math.inf]), torch.tensor([advantage])
    )
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()


class _NeverSampled(Mask):
    """Rejects what the generator called impossible."""

    @override
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        return tokens.logprobs != -math.inf


@pytest.mark.parametrize("entropy", [0.0, 1e-3])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_token_that_a_mask_rejects_adds_nothing_however_its_ratio_overflows(
    name: str, advantage: float, entropy: float
) -> None:
    loss = compose(load_loss(settings_of(name)), {"never_sampled": _NeverSampled()}, entropy=entropy)
    policy, generator = torch.tensor([-1.0, GENERATOR]), torch.tensor([-math.inf, GENERATOR])
    losses, gradient = loss_and_gradient(loss, policy, generator, torch.full((2,), advantage))
    assert losses[0] == 0
    assert torch.isfinite(gradient).all()
    if name not in {"gspo"}:  # whose ratio is one of both
        assert gradient[0] == 0


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in {"ipo", "dppo"}])
def test_nan_is_never_made_a_number(name: str) -> None:
    """`ipo` and `dppo` reject what they cannot compare."""
    losses, _ = loss_and_gradient(
        load_loss(settings_of(name)), torch.tensor([math.nan]), torch.tensor([GENERATOR]), torch.ones(1)
    )
    assert torch.isnan(losses).all()
