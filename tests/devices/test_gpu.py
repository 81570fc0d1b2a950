"""On a real GPU: the same answers as on a CPU, within what the precision allows."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from tailrace.generation.engines.torch import TorchEngine
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.generation.engine_support import Driver, forward_logprobs, make_model, prompts, request
from tests.training.conftest import model_folder
from tests.training.tiny import build_batch

pytestmark = pytest.mark.gpu

__all__ = ["model_folder"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_step_teaches_what_it_teaches_on_a_cpu(
    model_folder: Path, dtype: str, tolerance: float, gradient_checkpointing: bool
) -> None:
    metrics = {}
    for device in ("cpu", "cuda"):
        settings = TrainerSettings(
            device=device, dtype=dtype if device == "cuda" else "float32", gradient_checkpointing=gradient_checkpointing
        )
        trainer = Trainer(settings, model_name=str(model_folder), max_steps=10, max_staleness=4)
        metrics[device] = trainer.train_step(build_batch(lengths=(9, 40, 5, 120, 33), rows=(3, 2))).metrics
    for name in ("training/loss", "training/grad_norm", "training/entropy"):
        assert metrics["cuda"][name] == pytest.approx(metrics["cpu"][name], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_the_engine_samples_from_the_model(dtype: str, tolerance: float) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    engine = TorchEngine(model.to(device="cuda", dtype=getattr(torch, dtype)), slots=4, max_model_tokens=128)
    requests = [request(f"r{index}", prompt, max_tokens=12) for index, prompt in enumerate(prompts(6))]
    for one, completion in zip(requests, Driver(engine).run(*requests), strict=True):
        expected = forward_logprobs(reference, one.prompt_token_ids.tolist(), completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=tolerance)
