"""Settings of a run that goes on: its own, and over them only what was given anew.

runs/<name>/config.toml         its settings, resolved
runs/<name>/recipe.toml         what its recipe or file said when it was started: what differs now was edited since
runs/<name>/modules_folder.txt  where that file was: modules beside it are found
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import tomli_w

from tailrace.config.overrides import LOSS_NAME, kept_by_environment, kept_by_loss
from tailrace.config.problems import dotted, validated
from tailrace.config.ray import RaySettings
from tailrace.config.restarts import RestartSettings
from tailrace.config.sections import end_of
from tailrace.config.settings import RunSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.config.sources import Key, Places, SettingsFile, Table, read_settings_file
from tailrace.errors import SettingsError
from tailrace.reporting.masking import flat, masked
from tailrace.training.settings.losses import DEFAULT_LOSS

CONFIG_FILE = "config.toml"
RECIPE_FILE = "recipe.toml"
MODULES_FILE = "modules_folder.txt"
OF_ONE_START = frozenset({"name", "resume", "allow_changed_settings", "observability.capture"})
"""Settings that say how a run is started, and not what it is: each start has those that it was given."""

OF_ONE_PLACE = frozenset(
    {
        *(f"trainer.{name}" for name in ("ranks", "sequence_parallel", "devices", "threads", "collective_timeout_s")),
        *(f"trainer.{name}" for name in ("gradient_checkpointing", "offload_activations", "offload_optimizer")),
        *(f"trainer.{name}" for name in ("checkpoint_every_steps", "keep_checkpoints", "export_tokens")),
        *(f"restarts.{name}" for name in RestartSettings.model_fields),
        *(f"shutdown.{name}" for name in ShutdownSettings.model_fields),
        *(f"observability.{name}" for name in ("watchdog_s", "no_progress_s", "ui", "tags")),
        *(f"observability.{name}" for name in ("live", "log_every_s", "log_level")),
        *(f"observability.{name}" for name in ("trackers", "tracker_project", "tracker_close_s")),
        *(f"generator.{name}" for name in ("devices", "connect", "connect_key", "connect_wait_s")),
        *(f"generator.{name}" for name in ("join_address", "join_key")),
        *(f"gateway.{name}" for name in ("host", "port")),
        *(f"transport.redis.{name}" for name in ("url", "start", "prefix", "outage_s")),
        *(f"ray.{name}" for name in RaySettings.model_fields),
        "deadline_scale",
    }
)
"""Settings that say how a run's work is spread, what is kept of it, how long is waited for what and who is told, and
change nothing of what it learns: a resume may have others."""

_ENVIRONMENTS = ("environments",)
_UNSET = "unset"


def resumed_file(folder: Path, given: SettingsFile) -> SettingsFile | None:
    """The run's own settings, with what was edited in the recipe or file since it was started; `given` is that now.

    None where there is no run. Where its own file is given, or its folder does not know what the recipe said then,
    nothing counts as edited. Raises `SettingsError`.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None
    own = read_settings_file(str(folder / CONFIG_FILE))
    recorded = folder / RECIPE_FILE
    is_known = recorded.is_file() and not given.is_at(folder / CONFIG_FILE)
    before = read_settings_file(str(recorded)).table if is_known else given.table
    return SettingsFile(own.path, _edited(_without_starts(own.table), before, given.table), own.lines)


def _without_starts(table: Table, prefix: str = "") -> Table:
    return {
        key: _without_starts(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in table.items()
        if f"{prefix}{key}" not in OF_ONE_START
    }


def _edited(own: Any, before: Any, now: Any, path: Key = ()) -> Any:
    """`own` with what changed from `before` to `now`; None is what is absent.

    A loss or environment that the file exchanged is taken as it is. Where the start had exchanged it, only what both
    know counts.

    >>> _edited({"a": 1, "b": {"c": 2}}, {"b": {"c": 7, "d": 4}}, {"b": {"c": 7, "d": 5}})
    {'a': 1, 'b': {'c': 2, 'd': 5}}
    """
    if before == now:
        return own
    if isinstance(own, dict) and (now is not None or _is_always_there(path)):
        before, now = ({} if one is None else one for one in (before, now))
    if all(isinstance(one, dict) for one in (own, before, now)):
        if kept_by := _kept_by(path):
            name, was, becomes = (one.get("name", DEFAULT_LOSS) for one in (own, before, now))
            if was != becomes:
                return now
            before, now = kept_by(before, name), kept_by(now, name)
        keys = dict.fromkeys([*own, *now])
        edited = {key: _edited(own.get(key), before.get(key), now.get(key), (*path, key)) for key in keys}
        return {key: value for key, value in edited.items() if value is not None}
    if all(isinstance(one, list) for one in (own, before, now)) and len(own) == len(before):
        if path == _ENVIRONMENTS:
            own, before = _in_order_of(now, before, own)
        if len(now) == len(before):
            entries = enumerate(zip(own, before, now, strict=True))
            return [_edited(*entry, (*path, index)) for index, entry in entries]
    return now


def _kept_by(path: Key) -> Callable[[Table, object], Table] | None:
    """What another loss or environment keeps of the one there; None elsewhere."""
    if path == LOSS_NAME[:-1]:
        return kept_by_loss
    return kept_by_environment if path[:-1] == _ENVIRONMENTS else None


def _in_order_of(now: list[Any], before: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
    """The run's environments and the file's of then, each where the file has it now; None where that is a new one.

    >>> _in_order_of([{"name": "c"}, {"name": "b"}], [{"name": "a"}, {"name": "b"}], [{"name": "a"}, {"name": "d"}])
    ([None, {'name': 'd'}], [None, {'name': 'b'}])
    """
    places = {_label(environment): place for place, environment in enumerate(before)}
    found = [places.get(_label(environment)) for environment in now]
    of_run, of_file = ([None if place is None else one[place] for place in found] for one in (own, before))
    return of_run, of_file


def _label(environment: Any) -> str:
    return str(environment.get("id") or environment.get("name")) if isinstance(environment, dict) else ""


def _is_always_there(path: Key) -> bool:
    """Whether a run has the table, though no file names it: without it, others of its settings stay as they are."""
    place = end_of(RunSettings, path)
    annotation = place.field.annotation if place.field else None
    is_table = bool(place.section or place.kinds) or get_origin(annotation) is dict
    return is_table and NoneType not in get_args(annotation)


def module_folders(settings_file: Path) -> list[Path]:
    """Where modules of a settings file's are: beside it, and of a run's own file beside the one that it began with."""
    recorded = settings_file.with_name(MODULES_FILE)
    is_known = settings_file.name == CONFIG_FILE and recorded.is_file()
    began = [Path(os.fsdecode(recorded.read_bytes()))] if is_known else []
    return [settings_file.resolve().parent, *began]


def own_settings(folder: Path) -> RunSettings | None:
    """Those that a run has, by its folder; None for a run that begins. Raises `SettingsError`."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    file = read_settings_file(str(folder / CONFIG_FILE))
    return validated(RunSettings, _without_starts(file.table), Places(file, set()))


def settings_as_toml(settings: RunSettings) -> str:
    """The resolved settings as a file that `tailrace train` takes. What is unset is left out: TOML has no null.

    Raises `SettingsError` for a null in what is free-form, such as an environment's arguments: there it is a value.
    """
    of_this_start = {"resume", "allow_changed_settings"}
    table = settings.model_dump(mode="json", exclude_none=True, exclude=of_this_start)
    for key in _nulls(table):
        raise SettingsError(
            f"{dotted(key)} is None, which TOML has not, and so no {CONFIG_FILE} of a run: leave it out", key=key
        )
    return tomli_w.dumps(table)


def _nulls(value: Any, key: Key = ()) -> Iterator[Key]:
    if value is None:
        yield key
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _nulls(inner, (*key, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nulls(inner, (*key, index))


class Difference(NamedTuple):
    """One setting that is not what the run has; keys of servers are masked."""

    name: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.now)} in place of {_shown(self.before)}"


def differences(before: RunSettings, now: RunSettings, *, of_places: bool = False) -> list[Difference]:
    """What the run would go on with that it did not have before, by name.

    With `of_places` also what a resume may have otherwise.
    """
    left_out = OF_ONE_START if of_places else OF_ONE_START | OF_ONE_PLACE
    tables = [settings.model_dump(mode="json") for settings in (before, now)]
    were, are = (flat(table) for table in tables)
    shown_before, shown_now = (flat(masked(table)) for table in tables)
    return [
        Difference(name, shown_before.get(name), shown_now.get(name))
        for name in [*were, *(name for name in are if name not in were)]
        if were.get(name) != are.get(name) and name not in left_out
    ]


def _shown(value: object) -> str:
    return _UNSET if value is None else repr(value) if isinstance(value, str) else str(value)
