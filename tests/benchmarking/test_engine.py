"""What `benchmarks/engine.py` calls the floors of a step."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.benchmark_programs import benchmark

engine = benchmark("engine")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return engine.small()


def test_the_floor_of_memory_is_a_copy_of_as_many_bytes_as_the_weights_have(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copied.append(source.nbytes)
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    engine.memory_floor_s(model)
    assert set(copied) == {sum(weight.nbytes for weight in model.parameters())}


def test_the_floor_of_products_is_that_of_the_faster_library(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_s = engine.compute_floor_s(model, 64)
    monkeypatch.setattr(engine, "fast_product", lambda rows, weight: None)
    assert engine.compute_floor_s(model, 64) < plain_s / 5


def test_the_engine_is_as_a_run_makes_it() -> None:
    made = engine.make_engine(engine.Case("small", "float32", 4, tokens=8, runs=1))
    assert made.limits.max_model_tokens == 1024
