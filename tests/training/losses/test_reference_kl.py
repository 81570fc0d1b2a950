"""The divergence from a reference: estimators, their gradients on average, and how it is added to a loss."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailrace.training.losses import Component, Divisor, LossTokens, add_up, load_components, load_loss
from tailrace.training.losses.reference_kl import REFERENCE_LOGPROBS
from tailrace.training.settings.components import ReferenceKlSettings
from tests.training.losses.support import Samples, as_any_loss, draw_samples, settings_of
from tests.training.losses.test_trl import Padded, clipped, mean_of_tokens, token_ratio

ESTIMATORS = get_args(ReferenceKlSettings.model_fields["estimator"].annotation)
MASKS = [{"name": "icepop", "low": 0.7, "high": 1.3}]
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)


def divergence(estimator: str, coefficient: float = 1.0) -> Component:
    given_settings = {"estimator": estimator, "coefficient": coefficient}
    (component,) = load_components(settings_of("clipped_ratio", reference_kl=given_settings))
    return component


def with_reference(samples: Samples, seed: int = 9) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(samples.logprobs), generator=generator, dtype=torch.float64)
    columns = {REFERENCE_LOGPROBS: samples.logprobs + 0.7 * noise}
    return dataclasses.replace(samples, tokens=dataclasses.replace(samples.tokens, columns=columns))


def value(estimator: str, policy: float, generator: float, reference: float) -> float:
    """Of one token, by the definition."""
    quotient = math.exp(reference) / math.exp(policy)
    return {
        "k1": math.log(1 / quotient),
        "k2": math.log(quotient) ** 2 / 2,
        "k3": quotient - 1 - math.log(quotient),
        "unbiased": math.exp(policy) / math.exp(generator) * (quotient - 1 - math.log(quotient)),
    }[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_values_and_derivatives_are_those_of_the_definition(estimator: str, lengths: list[int], seed: int) -> None:
    samples, step = with_reference(draw_samples(lengths, seed)), 1e-5
    tokens = samples.tokens
    losses, derivatives, kept = divergence(estimator).with_derivative(samples.logprobs, tokens)
    assert kept.all()
    columns = (samples.logprobs, tokens.logprobs, tokens.columns[REFERENCE_LOGPROBS])
    each = zip(*(column.tolist() for column in columns), strict=True)
    for number, (policy, generator, reference) in enumerate(each):
        expected = value(estimator, policy, generator, reference)
        assert float(losses[number]) == pytest.approx(expected, rel=1e-10, abs=1e-12)
        above, below = (value(estimator, policy + sign * step, generator, reference) for sign in (1, -1))
        assert float(derivatives[number]) == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)


def mean_gradient(estimator: str, logits: Tensor, sampled: Tensor, reference: Tensor) -> Tensor:
    """Of the estimate by the policy's logits, over every token that `sampled` may draw, as often as it does."""
    policy = torch.log_softmax(logits, -1)
    count = len(logits)
    zeros = torch.zeros(count, dtype=torch.float64)
    tokens = LossTokens(
        *(torch.arange(count), sampled, zeros, zeros + 1, zeros.int(), torch.tensor([0, count])),
        {REFERENCE_LOGPROBS: reference},
    )
    _, derivatives, _ = divergence(estimator).with_derivative(policy.detach(), tokens)
    (gradient,) = torch.autograd.grad((sampled.exp() * derivatives * policy).sum(), logits)
    return gradient


@pytest.mark.parametrize("seed", range(5))
def test_the_gradients_on_average_are_those_that_the_module_tells(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, other, third = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    policy = torch.log_softmax(logits, -1)
    reference, generated = torch.log_softmax(other, -1), torch.log_softmax(third, -1)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)
    own = policy.detach()
    for estimator, sampled, expected in (
        ("k1", own, torch.zeros(6, dtype=torch.float64)),
        ("k2", own, reverse),
        ("k3", own, forward),
        ("unbiased", own, reverse),
        ("unbiased", generated, reverse),
    ):
        found = mean_gradient(estimator, logits, sampled, reference)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(mean_gradient("k2", logits, generated, reference), reverse, rtol=1e-2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", ["k3", "unbiased"])
def test_a_loss_with_it_is_trls(estimator: str, seed: int) -> None:
    """`_compute_loss` with β; `unbiased` is its `use_bias_correction_kl`."""
    samples = with_reference(draw_samples([5, 1, 9, 3], seed))
    batch, beta = Padded(samples), 0.04
    reference = batch._pad(samples.tokens.columns[REFERENCE_LOGPROBS])
    difference = reference - batch.per_token_logps
    per_token_kl = torch.exp(difference) - difference - 1
    if estimator == "unbiased":
        per_token_kl = per_token_kl * token_ratio(batch)
    expected = mean_of_tokens(clipped(token_ratio(batch), batch, 0.2, 0.28) + beta * per_token_kl, batch)
    found, gradient = summed("dapo", samples, estimator, beta)
    assert found == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, batch.gradient(expected), rtol=1e-12, atol=1e-14)


def summed(
    name: str, samples: Samples, estimator: str, coefficient: float, *, general: bool = False, **given: object
) -> tuple[float, Tensor]:
    """Loss and gradient of a whole batch."""
    chosen = settings_of(name, reference_kl={"estimator": estimator, "coefficient": coefficient}, **given)
    loss, divisor = load_loss(chosen), Divisor.of_loss(chosen)
    _, kept = loss(samples.logprobs, samples.entropy, samples.tokens)
    final = divisor.final(samples.summary, int(kept.sum()))
    total = add_up(as_any_loss(loss) if general else loss, max(final, 1), load_components(chosen), samples.summary)
    leaf = samples.logprobs.clone().requires_grad_()
    losses, kept = total(leaf, samples.entropy, samples.tokens)
    assert kept.all()
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return float(losses.sum().detach()), gradient


@pytest.mark.parametrize("name", ["clipped_ratio", "dppo", "grpo", "dr_grpo", "gspo"])
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_each_is_divided_by_its_own_figure_whatever_the_other_rejects(name: str, lengths: list[int], seed: int) -> None:
    samples = with_reference(draw_samples(lengths, seed))
    component, planned = divergence("k3"), len(samples.logprobs)
    losses, derivatives, _ = component.with_derivative(samples.logprobs, samples.tokens)
    alone, alone_gradient = summed(name, samples, "k3", 0.0, masks=MASKS)
    for general in (False, True):
        both, gradient = summed(name, samples, "k3", 0.3, general=general, masks=MASKS)
        assert both == pytest.approx(alone + 0.3 * float(losses.sum()) / planned, rel=1e-11)
        torch.testing.assert_close(gradient, alone_gradient + 0.3 * derivatives / planned, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_reference_that_finds_a_token_much_likelier_gives_no_nan(estimator: str) -> None:
    samples = draw_samples([2], 0)
    tokens = dataclasses.replace(samples.tokens, columns={REFERENCE_LOGPROBS: torch.tensor([-0.1, -0.1])})
    losses, derivatives, _ = divergence(estimator).with_derivative(torch.tensor([-200.0, -0.1]), tokens)
    assert losses.isfinite().all()
    assert derivatives.isfinite().all()
    assert losses[1] == 0


@pytest.mark.parametrize("general", [False, True])
def test_what_is_infinite_and_only_measured_changes_nothing(general: bool) -> None:
    samples = draw_samples([4, 2], 0)
    columns = {REFERENCE_LOGPROBS: torch.full((6,), math.inf, dtype=torch.float64)}
    told = dataclasses.replace(samples, tokens=dataclasses.replace(samples.tokens, columns=columns))
    found, gradient = summed("clipped_ratio", told, "k3", 0.0, general=general)
    expected, plain = summed("clipped_ratio", with_reference(samples), "k3", 0.0, general=general)
    assert found == expected
    assert torch.equal(gradient, plain)
