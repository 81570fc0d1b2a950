"""The reverse divergence from a teacher: values, and the gradient that it has on average."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.training.losses import Component, LossTokens, load_components
from tests.training.losses.support import draw_samples, settings_of

TEACHER: dict[str, Any] = {"url": "http://teacher/v1", "model": "big"}


def distillation(**given: Any) -> Component:
    (component,) = load_components(settings_of("clipped_ratio", distillation={**TEACHER, **given}))
    return component


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_values_and_derivatives_are_those_of_the_equation(lengths: list[int], seed: int) -> None:
    samples = draw_samples(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    told = -torch.rand(len(samples.logprobs), generator=generator, dtype=torch.float64) * 5
    tokens = dataclasses.replace(samples.tokens, columns={"teacher_logprobs": told})
    losses, derivatives, kept = distillation(truncation=1.5).with_derivative(samples.logprobs, tokens)
    assert kept.all()
    columns = (samples.logprobs, tokens.logprobs, told)
    for number, (policy, sampled, teacher) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        expected = min(math.exp(policy) / math.exp(sampled), 1.5) * (policy - teacher)
        assert float(losses[number]) == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert float(derivatives[number]) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_its_gradient_on_average_is_that_of_the_reverse_divergence_whoever_sampled(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, second, third = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    policy, teacher, sampled = (torch.log_softmax(one, -1) for one in (logits, second, third))
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    zeros, offsets = torch.zeros(6, dtype=torch.float64), torch.tensor([0, 6])
    for drawn in (sampled, policy.detach()):
        tokens = LossTokens(
            *(torch.arange(6), drawn, zeros, zeros + 1, zeros.int(), offsets), {"teacher_logprobs": teacher}
        )
        _, derivatives, _ = distillation(truncation=1e9).with_derivative(policy.detach(), tokens)
        (found,) = torch.autograd.grad((drawn.exp() * derivatives * policy).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_policy_that_is_its_teacher_learns_nothing() -> None:
    samples = draw_samples([4], 0)
    tokens = dataclasses.replace(samples.tokens, columns={"teacher_logprobs": samples.logprobs})
    losses, derivatives, _ = distillation().with_derivative(samples.logprobs, tokens)
    assert losses.abs().max() == derivatives.abs().max() == 0
