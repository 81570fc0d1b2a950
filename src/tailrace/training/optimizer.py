"""AdamW with warm-up and decay."""

from __future__ import annotations

import math

import torch
from torch import nn

from tailrace.training.settings import TrainerSettings


def learning_rate(step: int, settings: TrainerSettings, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of a run of `max_steps`, or of `settings.decay_steps`.

    >>> settings = TrainerSettings(learning_rate=1.0, warmup_steps=2, decay="linear", decay_end=0.0)
    >>> [learning_rate(step, settings, max_steps=4) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    decay_steps = (settings.decay_steps or max_steps) - settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    left = {
        "constant": 1.0,
        "linear": 1.0 - done * (1.0 - settings.decay_end),
        "cosine": settings.decay_end + (1.0 - settings.decay_end) * (1.0 + math.cos(math.pi * done)) / 2.0,
    }[settings.decay]
    return settings.learning_rate * left


def make_optimizer(model: nn.Module, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW over every trainable weight; only matrices decay (norms and biases don't)."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
