"""What a run's newest checkpoint tells before a resume begins: whether it can go on with the settings given now."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

from tailrace.config import RunSettings
from tailrace.errors import ModelError, SettingsError
from tailrace.models.loading import outline_of
from tailrace.training.checkpoints.files import OPTIMIZER, latest_checkpoint
from tailrace.training.checkpoints.moments import other_optimizer
from tailrace.training.model.adapter import AdapterShape, other_adapter, target_layers


def require_own_checkpoint(settings: RunSettings, folder: Path) -> None:
    """Refuse, as the trainer would, settings of another adapter or optimizer than the newest checkpoint in `folder`.

    Imports transformers. Raises `SettingsError`, and `CheckpointError` where none can be read.
    """
    if (checkpoint := latest_checkpoint(folder)) is None:
        return
    why_not = other_adapter(checkpoint, _shape(settings))
    if why_not := why_not or other_optimizer(checkpoint / OPTIMIZER, settings.trainer.optimizer):
        raise SettingsError(why_not)


def _shape(settings: RunSettings) -> AdapterShape | None:
    lora = settings.trainer.lora
    if lora.rank is None:
        return None
    layers: frozenset[str] | None = None
    if importlib.util.find_spec("peft") is not None:  # it has a say in which they are
        with contextlib.suppress(ModelError):  # the trainer may be where the model is
            layers = frozenset(target_layers(outline_of(settings.model.name), lora))
    return AdapterShape(lora.rank, lora.chosen_alpha, layers)
