"""Inputs of checkpointed layers leave the device, and come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.cuda_streams import run_at_once
from tests.training.tiny import build_batch, tiny_model

LENGTHS, ROWS = (300, 500), (2,)
"""Rows whose hidden states are worth a copy."""


def gradients(model: str, *, offload: bool) -> list[torch.Tensor]:
    policy = PolicyModel(
        tiny_model(model), native_kernels=False, gradient_checkpointing=True, offload_activations=offload
    )
    row = build_batch(lengths=LENGTHS, rows=ROWS).row(0)
    policy(MicroBatch.of(row, 0), ClippedRatio(ClippedRatioSettings())).total.backward()
    return [weight.grad for weight in policy.parameters() if weight.grad is not None]


@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_gradients_are_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = list[tuple[int, ...]]()
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            copies.append(tuple(other.shape))
        return copy(self, other, non_blocking)

    run_at_once(monkeypatch.setattr)
    expected = gradients(model, offload=False)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    found = gradients(model, offload=True)
    assert len(copies) == 2  # one input of each layer
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gradient_checkpointing": True}, "device = 'cpu' has them there"),
        ({"device": "cuda"}, "write gradient_checkpointing = true"),
    ],
)
def test_settings_under_which_there_is_nothing_to_offload_are_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainerSettings.model_validate({"offload_activations": True, **given})


@pytest.mark.gpu
def test_a_gpu_takes_the_same_step(model_folder: Path) -> None:
    found = []
    for offload in (False, True):
        settings = TrainerSettings(device="cuda", gradient_checkpointing=True, offload_activations=offload)
        trainer = Trainer(settings, model_name=str(model_folder), max_steps=10, max_staleness=4)
        batch = build_batch(lengths=(500,) * 16, rows=(16,))
        found.append(trainer.train_step(batch).metrics)
    for name in ("training/loss", "training/grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-6)
