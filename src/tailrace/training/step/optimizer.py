"""AdamW, or Muon beside it, with warm-up and decay.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) takes the matrices inside of layers: its step is their
momentum, made nearly orthogonal by five Newton-Schulz iterations in bfloat16. Scaled by 0.2 √max(rows, columns) it is
as large as one of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, eq. 4), so that both
share a learning rate and a weight decay. Embeddings, head, vectors, single rows and stacked experts stay AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.errors import ModelError
from tailrace.models.sizes import inner_matrices, is_matrix
from tailrace.training.settings.trainer import OptimizerName, TrainerSettings
from tailrace.training.step.offloaded_moments import OffloadedAdamW

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MUON_MOMENTUM = 0.95
_ADAMW_KINDS, _MUON_KINDS = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def learning_rate(step: int, settings: TrainerSettings, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of a run of `max_steps`, or of `settings.decay_steps`.

    >>> settings = TrainerSettings(learning_rate=1.0, warmup_steps=2, decay="linear", decay_end=0.0)
    >>> [learning_rate(step, settings, max_steps=4) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    >>> settings = TrainerSettings(learning_rate=1.0, decay="cosine", decay_end=0.2)
    >>> [round(learning_rate(step, settings, max_steps=4), 3) for step in (1, 2, 4)]
    [0.883, 0.6, 0.2]
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


def make_optimizer(model: PreTrainedModel, settings: TrainerSettings) -> torch.optim.Optimizer:
    """Over every trainable weight; only matrices decay (norms and biases don't).

    Raises `ModelError` where Muon would have a matrix with fewer rows than ranks.
    """
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    inner = [one for one in inner_matrices(model) if one.requires_grad] if settings.optimizer == "muon" else []
    of_muon = {id(one) for one in inner}
    matrices = [weight for name, weight in weights if is_matrix(name, weight) and id(weight) not in of_muon]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": [weight for name, weight in weights if not is_matrix(name, weight)], "weight_decay": 0.0},
    ]
    common: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
    }
    used = [group for group in groups if group["params"]]
    if settings.offload_optimizer:
        return OffloadedAdamW(used, **common)
    adamw = torch.optim.AdamW(used, **common, fused=True)
    if not inner:
        return adamw
    _require_rows_for_all(model, of_muon)
    muon = torch.optim.Muon(
        inner,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=_MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return _Joined([muon, adamw])


def optimizer_name(optimizer: torch.optim.Optimizer) -> OptimizerName:
    """As `trainer.optimizer` has it."""
    return "muon" if any("momentum" in group for group in optimizer.param_groups) else "adamw"


def name_by_moments(kinds: Set[str]) -> OptimizerName:
    """Of the optimizer that keeps moments of these kinds. Muon has weights that are AdamW's.

    >>> name_by_moments({"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})
    'muon'
    """
    return "adamw" if kinds.isdisjoint(_MUON_KINDS) else "muon"


def moment_kinds(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[str, ...]]:
    """What the optimizer keeps of each weight, once it was updated, by the names in its state."""
    return {
        weight: _MUON_KINDS if "momentum" in group else _ADAMW_KINDS
        for group in optimizer.param_groups
        for weight in group["params"]
    }


def _require_rows_for_all(model: PreTrainedModel, of_muon: Set[int]) -> None:
    """torch takes no step of a matrix with fewer rows than ranks. With as many a rank may have none (2, 2, 0 of 4)."""
    from torch.distributed.tensor import DTensor

    for name, weight in model.named_parameters():
        if id(weight) not in of_muon or not isinstance(weight, DTensor):
            continue
        if (rows := len(weight)) < (ranks := weight.device_mesh.size()):
            raise ModelError(
                f"trainer.optimizer is 'muon', and {name} has {rows} rows for {ranks} ranks: set trainer.ranks to "
                f"{rows} or less, or trainer.optimizer to 'adamw'"
            )


class _Joined(torch.optim.Optimizer):
    """Several optimizers as one: groups and state are those of all."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts, first = parts, 0
        for part in parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state, first = self.param_groups[first:last], self.state, last

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Of each part."""
        assert closure is None
        for part in self._parts:
            part.step()
