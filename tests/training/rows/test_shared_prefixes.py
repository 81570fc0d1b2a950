"""Samples that begin alike share what they begin with, and nothing else changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.records import Batch
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.shared_prefixes import share_prefixes
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
