"""Benchmarks that are run from their own folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.generation.engines.torch import sampler
from tests.support.benchmark_programs import benchmark


def test_publishing_is_timed_with_the_conversion_of_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_sync = benchmark("weight_sync")
    converted: list[torch.dtype] = []

    def published(weights: Mapping[str, torch.Tensor], precision: torch.dtype) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        converted.extend({weight.dtype for weight in weights.values()})
        return {name: weight.to(precision) for name, weight in weights.items()}

    monkeypatch.setattr(weight_sync, "published", published)
    monkeypatch.setattr(weight_sync, "make_smollm2", lambda layers: torch.nn.Linear(8, 8))
    monkeypatch.setattr(weight_sync, "tune_process", lambda: None)
    versions, told = iter([1, 2, None]), list[Any]()
    weight_sync.trainer(SimpleNamespace(recv=lambda: next(versions), send=told.append), str(tmp_path), "bfloat16", 1)
    size, *answers = told
    assert size == 2 * (8 * 8 + 8)
    assert set(converted) == {torch.float32}
    assert [publish_s >= 0.05 for _, publish_s, _ in answers] == [True, True]


def test_sampling_takes_the_native_pass_where_an_engine_does() -> None:
    sampling = benchmark("sampling")
    taken: list[str] = []

    def sample_all(
        logits: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(case)
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))

    logits = torch.randn(sampling.ROWS, 5000)
    for case in sampling.CASES:
        sampling.measure(case, logits, None if case == "all" else sample_all)
    assert taken == ["native"]


def test_one_restricted_row_takes_all_rows_off_the_native_pass() -> None:
    def sample_all(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError

    top_ps = np.ones(4, np.float32)
    top_ps[2] = 0.9
    sampled = sampler.sample(
        torch.randn(4, 100),
        temperatures=np.ones(4, np.float32),
        top_ps=top_ps,
        top_ks=np.zeros(4, np.int32),
        draws=np.full(4, 0.5),
        sample_all=sample_all,
    )
    assert len(sampled.token_ids) == 4


def test_tokens_that_a_group_shares_are_computed_once() -> None:
    gpu = benchmark("gpu")
    assert gpu.computed_tokens(gpu.Samples([1024] * 16, 512), vocabulary=151_936) == 9216
    assert gpu.computed_tokens(gpu.Samples([1000, 500]), vocabulary=151_936) == 1500
