"""Masks reject what they say, leave losses as they are otherwise, and are counted by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tailrace.training.losses import Loss, MeasuredLoss, PointwiseLoss, load_loss
from tests.training.losses.references import OneSequence, objective
from tests.training.losses.support import BUILT_IN, LENGTH, Samples, draw_samples, settings_of, train_on
from tests.training.losses.test_references import SAMPLES, sequences_of

MASKS: dict[str, dict[str, object]] = {
    "icepop": {"name": "icepop", "low": 0.7, "high": 1.6},
    "sequence_ratio": {"name": "sequence_ratio", "low": 0.2, "high": 2.0},
    "geometric_ratio": {"name": "geometric_ratio", "low": 0.95, "high": 1.04},
    "off_policy_sequence": {"name": "off_policy_sequence", "threshold": 0.05},
}


def keeps(name: str, one: OneSequence) -> list[bool]:
    """The reference: one sequence, in plain Python."""
    log_ratios = [float(policy - sampled) for policy, sampled in zip(one.policy, one.generator, strict=True)]
    if name == "icepop":
        return [0.7 <= math.exp(log_ratio) <= 1.6 for log_ratio in log_ratios]
    if name == "sequence_ratio":
        return [0.2 <= math.prod(map(math.exp, log_ratios)) <= 2.0] * len(log_ratios)
    if name == "geometric_ratio":
        mean = math.prod(map(math.exp, log_ratios)) ** (1 / max(len(log_ratios), 1))
        return [0.95 <= mean <= 1.04] * len(log_ratios)
    divergence = -sum(log_ratios) / max(len(log_ratios), 1)
    return [advantage >= 0 or divergence <= 0.05 for advantage in one.advantages]


def rejected(loss: Loss, samples: Samples) -> dict[str, int]:
    """How many tokens each reason rejects."""
    assert isinstance(loss, MeasuredLoss)
    found = loss.token_metrics(samples.logprobs, samples.tokens)
    start = "training/rejected_share/"
    return {name.removeprefix(start): int(found[name].sum()) for name in found if name.startswith(start)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", BUILT_IN)
@given(samples=SAMPLES)
@settings(max_examples=10)
def test_a_mask_takes_tokens_out_of_any_loss(name: str, mask: str, samples: Samples) -> None:
    found = train_on(settings_of(name, masks=[MASKS[mask]]), samples)
    sequences = sequences_of(samples)
    kept = [keeps(mask, one) for one in sequences]
    loss, gradient = objective(name, sequences, length=LENGTH, kept=kept)
    assert found.loss == pytest.approx(loss, rel=1e-11, abs=1e-12)
    np.testing.assert_allclose(found.gradient.numpy(), gradient, rtol=1e-11, atol=1e-12)


def test_what_is_rejected_is_counted_by_reason() -> None:
    samples = draw_samples([6, 1, 8, 3], seed=5, spread=0.6)
    loss = load_loss(settings_of("ipo", threshold=0.05, masks=list(MASKS.values())))
    sequences = sequences_of(samples)
    expected = {name: sum(not kept for one in sequences for kept in keeps(name, one)) for name in MASKS}
    difference = (samples.logprobs.exp() - samples.tokens.logprobs.exp()).abs()
    found = rejected(loss, samples)
    assert found == {"ipo": int((difference > 0.05).sum()), **expected}
    assert all(found.values())
    kept = loss(samples.logprobs, samples.entropy, samples.tokens)[1]
    assert max(found.values()) <= int((~kept).sum()) <= sum(found.values())  # two reasons may reject the same token


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_masks_of_tokens_leave_a_pointwise_loss_pointwise(name: str) -> None:
    plain = load_loss(settings_of(name))
    assert isinstance(plain, PointwiseLoss) == (name != "gspo")
    for mask in MASKS.values():
        masked = load_loss(settings_of(name, masks=[mask]))
        assert isinstance(masked, PointwiseLoss) == (name != "gspo" and mask["name"] == "icepop")
    assert not isinstance(load_loss(settings_of(name, entropy=0.1)), PointwiseLoss)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_bonus_for_entropy_is_a_loss_of_what_is_kept(name: str) -> None:
    samples = draw_samples([4, 2, 7], seed=1)
    masks = [MASKS["icepop"]]
    without, with_bonus = (load_loss(settings_of(name, masks=masks, entropy=c)) for c in (0.0, 0.25))
    entropy = samples.entropy.clone().requires_grad_()
    losses, kept = with_bonus(samples.logprobs, entropy, samples.tokens)
    (gradient,) = torch.autograd.grad(losses.where(kept, 0.0).sum(), entropy)
    plain, same = without(samples.logprobs, samples.entropy, samples.tokens)
    assert torch.equal(kept, same)
    lengths = samples.tokens.spread(samples.tokens.sample_lengths) if name in {"grpo", "gspo", "sapo"} else 1
    weight = torch.full_like(plain, 0.25) / lengths
    torch.testing.assert_close(losses, plain - weight * samples.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, -weight.where(kept, 0.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([{"name": "icepop"}, {"name": "icepop", "low": 0.1}], "masks has 'icepop' twice"),
        ([{"name": "icepop", "low": 1.5}], "a ratio of 1.* must lie between them"),
        ([{"name": "geometric_ratio", "high": 0.999}], "a ratio of 1.* must lie between them"),
        ([{"name": "off_policy_sequence"}], "threshold"),
    ],
)
def test_masks_that_make_no_sense_are_refused(masks: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of("cispo", masks=masks)
