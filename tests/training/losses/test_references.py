"""Every loss, its masks and its denominator against plain float64 references, for ragged samples and any rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailrace.training.losses import LossTokens, load_loss
from tailrace.training.losses.decoupled_ppo import PROXIMAL_LOGPROBS
from tailrace.training.settings.losses import OwnLossSettings
from tests.training.losses import references
from tests.training.losses.references import OneSequence, objective
from tests.training.losses.support import BUILT_IN, LENGTH, Samples, draw_samples, settings_of, train_on

SAMPLES = st.builds(
    draw_samples,
    st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    st.integers(0, 2**31),
    spread=st.sampled_from([1e-4, 0.02, 0.5, 3.0]),
    per_token=st.booleans(),
)

OTHER_SETTINGS: dict[str, dict[str, float]] = {
    "clipped_ratio": {"clip_low": 0.4, "clip_high": 0.1, "truncation": 1.5},
    "dapo": {"clip_low": 0.4, "clip_high": 0.1},
    "grpo": {"clip_low": 0.1, "clip_high": 0.4},
    "dr_grpo": {"clip_low": 0.3, "clip_high": 0.1},
    "cispo": {"lowest_weight": 0.8, "truncation": 1.5},
    "aipo": {"truncation": 1.5},
    "ipo": {"threshold": 0.05},
    "dppo": {"threshold": 0.05},
    "decoupled_ppo": {"highest_weight": 1.5},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "sapo": {"temperature_positive": 0.5, "temperature_negative": 2.0},
}


def sequences_of(samples: Samples) -> list[OneSequence]:
    columns = (samples.logprobs, samples.tokens.logprobs, samples.tokens.advantages)
    edges = samples.tokens.sample_offsets.tolist()
    pairs = itertools.pairwise(edges)
    return [OneSequence(*(column[first:last].numpy() for column in columns)) for first, last in pairs]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [*((name, {}) for name in BUILT_IN), *(pytest.param(*one, id=f"{one[0]}-other") for one in OTHER_SETTINGS.items())],
)
@given(samples=SAMPLES)
@settings(max_examples=40)
def test_loss_and_gradient_are_the_references(name: str, chosen: dict[str, float], samples: Samples) -> None:
    found = train_on(settings_of(name, **chosen), samples)
    loss, gradient = objective(name, sequences_of(samples), length=LENGTH, **chosen)
    assert found.loss == pytest.approx(loss, rel=1e-11, abs=1e-12)
    np.testing.assert_allclose(found.gradient.numpy(), gradient, rtol=1e-11, atol=1e-12)


@given(samples=SAMPLES)
@settings(max_examples=40)
def test_dppo_measures_by_kl_too(samples: Samples) -> None:
    found = train_on(settings_of("dppo", divergence="kl"), samples)
    expected = [
        references.dppo(*one.token(token), divergence="kl").kept
        for one in sequences_of(samples)
        for token in range(len(one.policy))
    ]
    assert found.kept.tolist() == expected


@pytest.mark.parametrize(
    "chosen", [{}, {"clip_low": 0.1, "clip_high": 0.3, "highest_weight": 1.5}], ids=["default", "other"]
)
@given(samples=SAMPLES, seed=st.integers(0, 2**31))
@settings(max_examples=40)
def test_decoupled_ppo_clips_against_the_proximal_policy(chosen: dict[str, float], samples: Samples, seed: int) -> None:
    drift = 0.3 * torch.randn(samples.logprobs.shape, generator=torch.Generator().manual_seed(seed)).double()
    proximal = (samples.logprobs + drift).clamp(max=-1e-3)
    tokens = replace(samples.tokens, columns={PROXIMAL_LOGPROBS: proximal})
    leaf = samples.logprobs.clone().requires_grad_()
    losses, kept = load_loss(settings_of("decoupled_ppo", **chosen))(leaf, samples.entropy, tokens)
    losses.where(kept, 0.0).sum().backward()
    columns = zip(samples.logprobs, tokens.logprobs, tokens.advantages, proximal, strict=True)
    expected = [references.decoupled_ppo(*map(float, column), **chosen) for column in columns]
    assert kept.tolist() == [one.kept for one in expected]
    assert leaf.grad is not None
    for found, name in ((losses.where(kept, 0.0).detach(), "loss"), (leaf.grad, "derivative")):
        wanted = [getattr(one, name) * one.kept for one in expected]
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "sapo"])
def test_gradients_are_central_differences_where_nothing_is_stopped(name: str) -> None:
    samples, step = draw_samples([3, 0, 5, 2], seed=4, spread=2e-4 if name == "gspo" else 0.3), 1e-6
    gradient = train_on(settings_of(name), samples).gradient
    for token in range(len(samples.logprobs)):
        shift = torch.zeros_like(samples.logprobs)
        shift[token] = step
        above, below = (
            train_on(settings_of(name), Samples(samples.tokens, samples.logprobs + sign * shift, samples.entropy)).loss
            for sign in (1, -1)
        )
        assert float(gradient[token]) == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", BUILT_IN)
@given(samples=SAMPLES, cuts=st.sets(st.integers(1, 5)), masked=st.booleans())
@settings(max_examples=25)
def test_how_samples_lie_in_rows_changes_no_gradient(name: str, samples: Samples, cuts: set[int], masked: bool) -> None:
    masks = [{"name": "icepop"}, {"name": "geometric_ratio", "low": 0.8, "high": 1.2}] if masked else []
    chosen = settings_of(name, masks=masks, entropy=0.01 if masked else 0.0)
    count = len(samples.tokens.sample_lengths)
    edges = [0, *sorted(cut for cut in cuts if cut < count), count]
    one, many = train_on(chosen, samples), train_on(chosen, samples, edges)
    assert one.loss == pytest.approx(many.loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(many.gradient, one.gradient, rtol=1e-12, atol=1e-12)
    assert torch.equal(one.kept, many.kept)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_ratio_that_overflows_gives_no_nan(name: str) -> None:
    zeros, one = torch.zeros(3), torch.ones(3)
    sampled, offsets = torch.full((3,), -200.0), torch.tensor([0, 1, 2, 3])
    tokens = LossTokens(zeros.long(), sampled, torch.tensor([1.0, 0.0, 0.0]), one, zeros.int(), offsets)
    leaf = torch.full((3,), -0.1).requires_grad_()
    losses, kept = load_loss(settings_of(name))(leaf, zeros, tokens)
    (gradient,) = torch.autograd.grad(losses.where(kept, 0.0)[1:].sum(), leaf)
    assert losses[1:].tolist() == [0, 0]
    assert gradient[1:].tolist() == [0, 0]


def halved(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    return -0.5 * tokens.advantages * logprobs, tokens.advantages > 0


@pytest.mark.parametrize("denominator", ["kept_tokens", "planned_tokens", "sequences"])
def test_a_loss_of_ones_own_is_divided_by_what_its_settings_say(denominator: str) -> None:
    samples = draw_samples([3, 0, 5, 2], seed=2)
    chosen = OwnLossSettings.model_validate({"name": f"{__name__}:halved", "denominator": denominator})
    found = train_on(chosen, samples, edges=[0, 2, 4])
    kept, lengths = samples.tokens.advantages > 0, samples.tokens.spread(samples.tokens.sample_lengths)
    expected = (-0.5 * samples.tokens.advantages).where(kept, 0.0)
    divisor = {"kept_tokens": kept.sum(), "planned_tokens": len(kept), "sequences": 3 * lengths}[denominator]
    torch.testing.assert_close(found.gradient, expected / divisor, rtol=1e-12, atol=1e-12)
