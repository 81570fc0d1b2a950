"""Where the trainer asks for speed on a CPU; it runs without any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tailrace.cpu.trainer import TrainerAcceleration


def accelerate(model: PreTrainedModel, *, native_kernels: bool, under_autocast: bool) -> TrainerAcceleration | None:
    """Speed up a float32 model that lies on a CPU; None for another, and where `tailrace.cpu` is missing or switched
    off."""
    if model.device.type != "cpu" or model.dtype is not torch.float32:
        return None
    try:
        from tailrace.cpu.trainer import speed_up_trainer
    except ImportError:
        return None
    return speed_up_trainer(model, native_kernels=native_kernels, under_autocast=under_autocast)


def tune_process() -> None:
    """Let this process keep the memory of big tensors. Call it before the thread that computes is started."""
    try:
        from tailrace.cpu.memory import keep_freed_memory
    except ImportError:
        return
    keep_freed_memory()
