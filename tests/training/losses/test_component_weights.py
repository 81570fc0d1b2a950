"""Weights per token of what is added to a loss, against plain Python in float64 and against autograd."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import log_softmax

from tailrace.records import DISTILLATION_WEIGHTS, REFERENCE_KL_WEIGHTS, TEACHER_LOGPROBS, Batch
from tailrace.training.losses import Divisor, add_up, load_components, load_loss
from tailrace.training.losses.reference_kl import REFERENCE_LOGPROBS
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.step.gradients import GradientPasses
from tests.training.losses import references
from tests.training.losses.support import Samples, as_any_loss, draw_samples, settings_of
from tests.training.losses.test_reference_kl import ESTIMATORS, value
from tests.training.test_trainer import make_trainer
from tests.training.tiny import build_batch, tiny_model, weighing

TEACHER: dict[str, Any] = {"url": "http://teacher/v1", "model": "big", "truncation": 1.5}
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0, -0.5]), min_size=35, max_size=35)


def with_columns(samples: Samples, weights: dict[str, list[float]]) -> Samples:
    generator, count = torch.Generator().manual_seed(7), len(samples.logprobs)
    noise = torch.randn(2, count, generator=generator, dtype=torch.float64)
    columns = {
        REFERENCE_LOGPROBS: samples.logprobs + 0.7 * noise[0],
        TEACHER_LOGPROBS: samples.logprobs + 0.7 * noise[1],
        **{name: torch.tensor(own[:count], dtype=torch.float32) for name, own in weights.items()},
    }
    return dataclasses.replace(samples, tokens=dataclasses.replace(samples.tokens, columns=columns))


def by_hand(
    samples: Samples, weights: dict[str, list[float]], estimator: str, *, kl: float, teaching: float
) -> tuple[float, list[float]]:
    """What both components add, and the derivative by each log π: token by token, from the equations."""
    tokens, step = samples.tokens, 1e-6
    columns = (samples.logprobs, tokens.logprobs, tokens.columns[REFERENCE_LOGPROBS], tokens.columns[TEACHER_LOGPROBS])
    each = list(zip(*(column.tolist() for column in columns), strict=True))
    near, taught = (weights[name][: len(each)] for name in (REFERENCE_KL_WEIGHTS, DISTILLATION_WEIGHTS))
    near_divisor, taught_divisor = (max(1, sum(weight != 0 for weight in own)) for own in (near, taught))
    total, derivatives = 0.0, []
    for (policy, sampled, reference, teacher), kl_weight, teacher_weight in zip(each, near, taught, strict=True):
        divergence = value(estimator, policy, sampled, reference)
        above, below = (value(estimator, policy + sign * step, sampled, reference) for sign in (1, -1))
        towards = min(math.exp(policy - sampled), 1.5) * (policy - teacher)
        total += kl * kl_weight * divergence / near_divisor + teaching * teacher_weight * towards / taught_divisor
        slope = (above - below) / (2 * step)
        derivatives.append(kl * kl_weight * slope / near_divisor + teaching * teacher_weight * towards / taught_divisor)
    return total, derivatives


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["clipped_ratio", "gspo", "dr_grpo"])
@given(lengths=LENGTHS, seed=st.integers(0, 99), near=WEIGHTS, taught=WEIGHTS, general=st.booleans())
@settings(max_examples=15, deadline=None)
def test_each_has_its_own_weights_and_its_own_divisor(
    *, name: str, estimator: str, lengths: list[int], seed: int, near: list[float], taught: list[float], general: bool
) -> None:
    weights = {REFERENCE_KL_WEIGHTS: near, DISTILLATION_WEIGHTS: taught}
    samples = with_columns(draw_samples(lengths, seed), weights)
    kl = {"estimator": estimator, "coefficient": 0.3}
    chosen = settings_of(name, reference_kl=kl, distillation={**TEACHER, "coefficient": 0.7})
    count = len(samples.logprobs)
    summary = msgspec.structs.replace(
        samples.summary, weightless_tokens={one: own[:count].count(0.0) for one, own in weights.items()}
    )
    loss, divisor = load_loss(chosen), Divisor.of_loss(chosen)
    final = divisor.final(summary, count)
    total = add_up(as_any_loss(loss) if general else loss, final, load_components(chosen), summary)
    leaf = samples.logprobs.clone().requires_grad_()
    losses, kept = total(leaf, samples.entropy, samples.tokens)
    assert kept.all()
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    edges = samples.tokens.sample_offsets.tolist()
    columns = (samples.logprobs, samples.tokens.logprobs, samples.tokens.advantages)
    sequences = [
        references.OneSequence(*(column[a:b].numpy() for column in columns)) for a, b in itertools.pairwise(edges)
    ]
    rewards, by_rewards = references.objective(name, sequences, length=20)
    added, by_added = by_hand(samples, weights, estimator, kl=0.3, teaching=0.7)
    assert float(losses.detach().sum()) == pytest.approx(rewards + added, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), by_rewards + np.array(by_added), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("component", ["reference_kl", "distillation"])
def test_a_token_without_a_weight_harms_nobody_however_infinite(component: str) -> None:
    samples = with_columns(draw_samples([4], 0), {f"{component}_weights": [0.0, 1.0, 1.0, 1.0]})
    filled = REFERENCE_LOGPROBS if component == "reference_kl" else TEACHER_LOGPROBS
    samples.tokens.columns[filled][0] = math.inf
    given_settings = {"estimator": "k3"} if component == "reference_kl" else TEACHER
    (chosen,) = load_components(settings_of("clipped_ratio", **{component: given_settings}))
    leaf = samples.logprobs.clone().requires_grad_()
    losses, kept = chosen(leaf, samples.entropy, samples.tokens)
    assert kept.tolist() == [False, True, True, True]
    (gradient,) = torch.autograd.grad(losses.where(kept, 0.0).sum(), leaf)
    assert gradient.isfinite().all()
    assert gradient[0] == 0


def through_a_model(batch: Batch, **given: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What a trainer would come to, in float64."""
    chosen, policy = (
        settings_of("clipped_ratio", **given),
        PolicyModel(tiny_model("qwen3").double(), native_kernels=False),
    )
    passes = GradientPasses(policy, load_loss(chosen), Divisor.of_loss(chosen), components=load_components(chosen))
    metrics, _ = passes.add(batch, 0).read(batch.summary)
    return {name: weight.grad for name, weight in policy.model.named_parameters()}, metrics


def test_gradients_of_a_model_are_those_of_transformers_and_torch() -> None:
    plain = build_batch(lengths=(9, 14, 5, 12, 7), rows=(2, 1, 2))
    told = np.random.default_rng(3).uniform(-6, -1, len(plain.token_ids)).astype(np.float32)
    batch = weighing(dataclasses.replace(plain, columns={TEACHER_LOGPROBS: told}), DISTILLATION_WEIGHTS)
    both, metrics = through_a_model(batch, distillation={**TEACHER, "coefficient": 0.5})
    rewards, _ = through_a_model(plain)
    weights, model = batch.columns[DISTILLATION_WEIGHTS], tiny_model("qwen3").double()
    total, measured, count = torch.zeros((), dtype=torch.float64), 0.0, np.count_nonzero(weights[batch.loss_mask])
    for start, end in zip(batch.sample_offsets[:-1], batch.sample_offsets[1:], strict=True):
        ids = torch.tensor(batch.token_ids[start:end].astype(np.int64))
        every = log_softmax(model(ids[None]).logits[0, :-1] / batch.temperatures[0].item(), -1)
        for place in np.flatnonzero(batch.loss_mask[start:end]).tolist():
            logprob, token = every[place - 1, ids[place]], start + place
            difference = float(logprob.detach()) - float(told[token])
            ratio = min(math.exp(float(logprob.detach()) - float(batch.logprobs[token])), 1.5)
            total = total + float(weights[token]) * ratio * difference * logprob
            measured += difference * bool(weights[token])
    (0.5 * total / count).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        expected = rewards[name] + weight.grad
        assert float((both[name] - expected).norm() / expected.norm()) < 1e-5, name
        assert float((both[name] - rewards[name]).norm() / expected.norm()) > 1e-3, name
    assert metrics["training/distillation"] == pytest.approx(measured / count, rel=1e-5)


def test_weights_of_1_change_nothing_and_none_at_all_leave_the_loss_of_rewards(model_folder: Path) -> None:
    plain = build_batch(lengths=(9, 14, 5, 12, 7), rows=(2, 1, 2))
    ones = np.ones(len(plain.token_ids), np.float32)
    nothing = msgspec.structs.replace(
        plain.summary, weightless_tokens={REFERENCE_KL_WEIGHTS: plain.summary.loss_tokens}
    )
    batches = {
        "plain": plain,
        "ones": dataclasses.replace(plain, columns={REFERENCE_KL_WEIGHTS: ones}),
        "none": dataclasses.replace(plain, columns={REFERENCE_KL_WEIGHTS: 0 * ones}, summary=nothing),
    }
    loss = {"reference_kl": {"coefficient": 1.0, "estimator": "k2", "model": str(model_folder)}}
    found = {name: make_trainer(model_folder, loss=loss).train_step(one).metrics for name, one in batches.items()}
    assert found["ones"]["training/loss"] == found["plain"]["training/loss"]
    assert found["none"]["training/loss"] == pytest.approx(found["plain"]["training/reward_loss"], rel=1e-6)
    assert "training/reference_kl" not in found["none"]
