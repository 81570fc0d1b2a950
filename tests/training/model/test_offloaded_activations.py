"""Inputs of checkpointed layers leave the device, and come back as they were."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.training.tiny import build_batch, tiny_model

LENGTHS, ROWS = (300, 500), (2,)
"""Rows whose hidden states are worth a copy."""


class Queue:
    """A stream, or an event in one, where everything runs at once."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Queue) -> None: ...

    def wait_event(self, event: Queue) -> None: ...

    def record(self, *_: Any) -> None: ...


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's tensors take the way of a GPU's."""
    for name, replacement in {"Stream": Queue, "Event": Queue, "current_stream": Queue, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, replacement)


def gradients(model: str, *, offload: bool) -> list[torch.Tensor]:
    policy = PolicyModel(
        tiny_model(model), native_kernels=False, gradient_checkpointing=True, offload_activations=offload
    )
    row = build_batch(lengths=LENGTHS, rows=ROWS).row(0)
    policy(MicroBatch.of(row, 0), ClippedRatio(ClippedRatioSettings())).total.backward()
    return [weight.grad for weight in policy.parameters() if weight.grad is not None]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_gradients_are_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = list[tuple[int, ...]]()
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            copies.append(tuple(other.shape))
        return copy(self, other, non_blocking)

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
