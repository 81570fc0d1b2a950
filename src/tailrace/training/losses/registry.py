"""From the name in settings to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from tailrace.errors import SettingsError
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.losses.protocol import Loss
from tailrace.training.settings import LossSettings
from tailrace.user_code import import_attribute

LOSSES: dict[str, Callable[[LossSettings], Loss]] = {"clipped_ratio": ClippedRatio}
"""By name; each is made from the settings of the loss."""


def load_loss(settings: LossSettings) -> Loss:
    """The loss that `settings` name. Raises `SettingsError` for what cannot be imported or is no function."""
    if (name := settings.name) in LOSSES:
        return LOSSES[name](settings)
    loss = import_attribute(name, setting="trainer.loss.name")
    if not callable(loss):
        raise SettingsError(f"trainer.loss.name is {name!r}: that is {loss!r:.80}, not a function")
    return cast("Loss", loss)
