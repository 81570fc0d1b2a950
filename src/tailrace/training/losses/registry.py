"""From settings to the loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, cast

from tailrace.errors import SettingsError
from tailrace.training.losses.aipo import Aipo
from tailrace.training.losses.cispo import Cispo
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.losses.components import Component
from tailrace.training.losses.composition import compose
from tailrace.training.losses.dapo import Dapo
from tailrace.training.losses.decoupled_ppo import DecoupledPpo
from tailrace.training.losses.demonstrations import CrossEntropy
from tailrace.training.losses.distillation import Distillation
from tailrace.training.losses.dppo import Dppo
from tailrace.training.losses.dr_grpo import DrGrpo
from tailrace.training.losses.grpo import Grpo
from tailrace.training.losses.gspo import Gspo
from tailrace.training.losses.ipo import Ipo
from tailrace.training.losses.masks import load_mask
from tailrace.training.losses.own import checked
from tailrace.training.losses.protocol import Loss, PointwiseLoss
from tailrace.training.losses.reference_kl import ReferenceKl
from tailrace.training.losses.sapo import Sapo
from tailrace.training.losses.selected_cross_entropy import SelectedCrossEntropy
from tailrace.training.losses.top_distillation import TopDistillation
from tailrace.training.settings import losses as settings_of
from tailrace.training.settings.losses import Denominator, LossSettings, OwnLossSettings
from tailrace.user_code import describe_failure, import_attribute

LOSSES: Mapping[type[settings_of.CommonLossSettings], Callable[..., Loss]] = {
    settings_of.ClippedRatioSettings: ClippedRatio,
    settings_of.DapoSettings: Dapo,
    settings_of.GrpoSettings: Grpo,
    settings_of.DrGrpoSettings: DrGrpo,
    settings_of.CispoSettings: Cispo,
    settings_of.AipoSettings: Aipo,
    settings_of.IpoSettings: Ipo,
    settings_of.DppoSettings: Dppo,
    settings_of.DecoupledPpoSettings: DecoupledPpo,
    settings_of.GspoSettings: Gspo,
    settings_of.SapoSettings: Sapo,
    settings_of.SelectedCrossEntropySettings: SelectedCrossEntropy,
}
"""By the class of their settings, from which each is made."""


def load_loss(settings: LossSettings, *, ranks_per_row: int = 1) -> Loss:
    """The loss that `settings` mean, with its masks. Raises `SettingsError` for what cannot be imported or called.

    With several `ranks_per_row` it will be given slices of samples: built-in losses sum over whole ones all the same
    (`LossTokens.sum_by_sample`), one's own are refused unless they judge each token by itself. One's own raises
    `TrainingError` when it is called and does not answer for each token.
    """
    loss = _own_loss(settings) if isinstance(settings, OwnLossSettings) else LOSSES[type(settings)](settings)
    if ranks_per_row > 1 and isinstance(settings, OwnLossSettings) and not isinstance(loss, PointwiseLoss):
        raise SettingsError(
            f"trainer.sequence_parallel = {ranks_per_row} gives each rank a slice of every sample, and "
            f"trainer.loss.name = {settings.name!r} may look at whole ones: make it a PointwiseLoss, or leave out "
            "trainer.sequence_parallel",
            key=("trainer", "sequence_parallel"),
        )
    masks = {str(mask.name): load_mask(mask) for mask in settings.masks}
    per_sequence = settings.denominator == Denominator.SEQUENCES
    if isinstance(settings, OwnLossSettings):
        loss = checked(loss, settings.name)
    return compose(loss, masks, entropy=settings.entropy, per_sequence=per_sequence)


def load_components(settings: LossSettings) -> tuple[Component, ...]:
    """What `settings` add to the loss of rewards."""
    components = list[Component]()
    if settings.reference_kl is not None:
        components.append(ReferenceKl(settings.reference_kl))
    if settings.cross_entropy is not None:
        components.append(CrossEntropy(settings.cross_entropy))
    if settings.distillation is not None:
        chosen = Distillation if settings.distillation.top_k is None else TopDistillation
        components.append(chosen(settings.distillation))
    return tuple(components)


def _own_loss(settings: OwnLossSettings) -> Loss:
    """A class is made with `args`; a function is given them at each call; any other object takes none."""
    given = import_attribute(settings.name, setting="trainer.loss.name")
    if isinstance(given, type):
        return _require_loss(_made(given, settings), settings, {})
    if settings.args and not isinstance(given, FunctionType):
        raise SettingsError(
            f"trainer.loss.name is {settings.name!r}: trainer.loss.args are for a class or a function, and that is "
            f"{given!r:.80}: leave them out"
        )
    loss = _require_loss(given, settings, settings.args)
    return functools.partial(loss, **settings.args) if settings.args else loss


def _made(own_class: type, settings: OwnLossSettings) -> object:
    try:
        return own_class(**settings.args)
    except Exception as error:
        raise SettingsError(
            f"trainer.loss.name is {settings.name!r}: making it with trainer.loss.args = {settings.args} raised "
            f"{describe_failure(error)}"
        ) from error


def _require_loss(given: object, settings: OwnLossSettings, args: Mapping[str, Any]) -> Loss:
    """`given`, if it can be called as a loss is."""
    if not callable(given):
        raise SettingsError(f"trainer.loss.name is {settings.name!r}: that is {given!r:.80}, not a function")
    try:
        inspect.signature(given).bind(*("logprobs", "entropy", "tokens"), **args)
    except TypeError as error:
        raise SettingsError(
            f"trainer.loss.name is {settings.name!r}: it cannot be called with (logprobs, entropy, tokens) and "
            f"trainer.loss.args = {dict(args)}: {error}"
        ) from error
    except ValueError:  # without a signature, as what is written in C
        pass
    return cast("Loss", given)
