"""Names of trackers: built-in ones, those that packages install, and `module:attribute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple, cast

from tailrace.errors import SettingsError
from tailrace.extras import require_extra
from tailrace.near_names import did_you_mean
from tailrace.reporting.trackers.protocol import TrackedRun, Tracker
from tailrace.user_code import import_attribute

ENTRY_POINT_GROUP = "tailrace.trackers"
SETTING = "observability.trackers"
MakeTracker = Callable[[TrackedRun], Tracker]


class _BuiltIn(NamedTuple):
    path: str
    package: str
    """What it imports, from the extra of the tracker's name."""


BUILT_IN = {
    "mlflow": _BuiltIn("tailrace.reporting.trackers.mlflow:MlflowTracker", "mlflow"),
    "tensorboard": _BuiltIn("tailrace.reporting.trackers.tensorboard:TensorboardTracker", "tensorboard"),
    "trackio": _BuiltIn("tailrace.reporting.trackers.trackio:TrackioTracker", "trackio"),
    "wandb": _BuiltIn("tailrace.reporting.trackers.wandb:WandbTracker", "wandb"),
}
"""Imported in the tracker's process alone."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `SettingsError` for a name that is none, for a package that is missing, and for one of your own that cannot
    be imported. Built-in and installed ones are not imported here."""
    for name in names:
        path = _path(name)
        if name in BUILT_IN:
            _require_package(name)
        elif path == name:
            load(name)


def load(name: str) -> MakeTracker:
    """What makes the tracker. Raises `SettingsError`."""
    made = import_attribute(_path(name), setting=SETTING)
    if not callable(made):
        raise SettingsError(f"{SETTING}: {name!r} is no class and no function that takes a TrackedRun")
    return cast(MakeTracker, made)


def short_name(name: str, taken: Sequence[str] = ()) -> str:
    """For metrics, logs and folders: what stands behind the colon of `module:attribute`; told apart by a number.

    >>> short_name("wandb"), short_name("mine.trackers:Csv"), short_name("Csv", ["Csv"])
    ('wandb', 'Csv', 'Csv-2')
    """
    short = name.rpartition(":")[2].replace("/", "_")
    others = sum(one == short or one.startswith(f"{short}-") for one in taken)
    return f"{short}-{others + 1}" if others else short


def _path(name: str) -> str:
    """As `module:attribute`."""
    if name in BUILT_IN:
        return BUILT_IN[name].path
    if ":" in name:
        return name
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point.value
    names = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})
    hint = did_you_mean(name, names, cutoff=0.5) or "."
    raise SettingsError(
        f"{SETTING}: {name!r} is no tracker{hint} Known ones: {', '.join(names)}; or write your own as "
        "`module:attribute`"
    )


def _require_package(name: str) -> None:
    require_extra(BUILT_IN[name].package, extra=name, what=f"{SETTING}: {name!r}")
