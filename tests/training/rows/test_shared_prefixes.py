"""Samples that begin alike share what they begin with, and nothing else changes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tailrace.records import Batch
from tailrace.training.losses import load_loss
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.shared_prefixes import PrefixCopies, share_prefixes
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.rows.test_packing import packed, reference
from tests.training.tiny import build_batch, tiny_model

SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def batch_with_common_beginnings(lengths: tuple[int, ...], common: int) -> Batch:
    """Even samples share one beginning and odd ones another, whose first half is the same."""
    batch = build_batch(lengths=lengths, rows=(len(lengths),), prompt=common - 2)
    token_ids, starts = batch.token_ids.copy(), np.cumsum([0, *lengths[:-1]])
    for index, start in enumerate(starts):
        token_ids[start : start + common] = np.arange(common) + (np.arange(common) >= common // 2) * (index % 2) * 20
    return dataclasses.replace(batch, token_ids=token_ids)


@given(SAMPLES)
def test_every_token_finds_an_equal_one_behind_equal_ones(samples: list[list[int]]) -> None:
    token_ids = np.array([token for sample in samples for token in sample], np.int32)
    shared = share_prefixes(token_ids, [len(sample) for sample in samples])
    assert np.array_equal(token_ids[shared.computed][shared.place], token_ids)
    beginnings = {tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))}
    assert shared.computed.sum() == len(beginnings)
    ends = np.cumsum([len(sample) for sample in samples])
    by_place: dict[int, tuple[int, ...]] = {}
    for sample, places in zip(samples, np.split(shared.place, ends[:-1]), strict=True):
        for index, place in enumerate(places.tolist()):
            assert by_place.setdefault(place, tuple(sample[: index + 1])) == tuple(sample[: index + 1])


@pytest.mark.parametrize("name", ["qwen3", "mistral with a sliding window", "gpt2"])
@pytest.mark.parametrize("lengths", [(40, 22, 21, 37, 25, 38), (20, 20, 20), (16, 200, 18)])
def test_shared_beginnings_change_no_loss_and_no_gradient(name: str, lengths: tuple[int, ...]) -> None:
    batch = batch_with_common_beginnings(lengths, common=14)
    assert MicroBatch.of(batch.row(0), 0).input_ids.shape[1] < sum(lengths)
    denominator = float(batch.loss_mask.sum())
    expected_loss, expected = reference(tiny_model(name), batch, denominator)
    loss, gradients = packed(tiny_model(name), batch, denominator)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for parameter, gradient in gradients.items():
        scale = float(expected[parameter].abs().max())
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-3, atol=1e-4 * scale, msg=parameter)


@given(SAMPLES, st.integers(0, 2**31))
def test_a_row_laid_out_in_full_gives_each_token_the_gradients_of_all_its_places(
    samples: list[list[int]], seed: int
) -> None:
    token_ids = np.array([token for sample in samples for token in sample], np.int32)
    shared = share_prefixes(token_ids, [len(sample) for sample in samples])
    copies, generator = PrefixCopies.of(shared), torch.Generator().manual_seed(seed)
    computed = torch.randn(shared.computed.sum(), 2, 3, generator=generator).double().requires_grad_()
    weights = torch.randn(len(token_ids), 2, 3, generator=generator).double()
    row = copies.spread(computed)
    (gradient,) = torch.autograd.grad((row * weights).sum(), computed)
    assert torch.equal(row, computed[torch.from_numpy(shared.place)])
    assert torch.equal(copies.take(row), computed)
    expected = torch.zeros_like(computed).index_add_(0, torch.from_numpy(shared.place), weights)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *_: object, scale: float, **__: Any
) -> Tensor:
    """What torch's variable-length kernel computes, which a CPU lacks."""
    segments = itertools.pairwise(offsets.tolist())
    parts = [[tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)] for start, end in segments]
    outputs = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True) for part in parts]
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


@pytest.mark.parametrize(("common", "is_shared"), [(14, True), (3, False)])
def test_a_kernel_that_takes_rows_as_they_are_gets_them_in_full(
    common: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.training.rows.attention.varlen_attn", ragged_attention)
    row = batch_with_common_beginnings((40, 22, 21, 37, 25, 38), common).row(0)
    gradients = []
    for padded in (True, False):
        policy = PolicyModel(tiny_model("qwen3"), dtype="bfloat16", native_kernels=False)
        micro_batch = MicroBatch.of(row, 0, padded=padded)
        assert (micro_batch.input_ids.shape[1] < len(row.token_ids)) == (padded or is_shared)
        policy(micro_batch, load_loss(ClippedRatioSettings())).total.backward()
        gradients.append({name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None})
    expected, found = gradients
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < 0.03, name
