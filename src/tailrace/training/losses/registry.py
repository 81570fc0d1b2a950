"""From the name in settings to the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from tailrace.errors import SettingsError
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.losses.protocol import Loss
from tailrace.training.settings import LossSettings

LOSSES: dict[str, Callable[[LossSettings], Loss]] = {"clipped_ratio": ClippedRatio}
"""By name; each is made from the settings of the loss."""


def load_loss(settings: LossSettings) -> Loss:
    """The loss that `settings` name. Raises `SettingsError` for a module or function that does not exist."""
    if (name := settings.name) in LOSSES:
        return LOSSES[name](settings)
    module, _, attribute = name.partition(":")
    try:
        loss = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise SettingsError(f"trainer.loss.name is {name!r}, but {module} cannot be imported: {error}") from error
    if not callable(loss):
        raise SettingsError(f"trainer.loss.name is {name!r}, but {module} has no function {attribute!r}")
    return cast("Loss", loss)
