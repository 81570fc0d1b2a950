"""Every setting of a run: typed, documented, with units.

A recipe or TOML file and `--dotted.overrides` flow in, one frozen `RunSettings` flows out, or a `SettingsError` that
names the key, the line and the nearest valid name. Each part owns the class of its own section; nothing here acts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailrace.config.deadlines import with_scaled_deadlines
from tailrace.config.generators_alone import without_training
from tailrace.config.overrides import apply_overrides, flattened, parse_overrides
from tailrace.config.plan import plan_run, with_decay_end
from tailrace.config.problems import validated
from tailrace.config.reference import settings_reference, simulation_reference
from tailrace.config.resuming import (
    CONFIG_FILE,
    MODULES_FILE,
    OF_ONE_PLACE,
    OF_ONE_START,
    RECIPE_FILE,
    Difference,
    differences,
    module_folders,
    own_settings,
    resumed_file,
    settings_as_toml,
)
from tailrace.config.settings import RunSettings
from tailrace.config.sources import (
    COMMAND_LINE,
    Key,
    Places,
    SettingsFile,
    as_index,
    list_recipes,
    read_settings_file,
)
from tailrace.errors import SettingsError
from tailrace.user_code import modules_in, working_folder

__all__ = [
    "CONFIG_FILE",
    "MODULES_FILE",
    "OF_ONE_PLACE",
    "OF_ONE_START",
    "RECIPE_FILE",
    "RUNS",
    "Difference",
    "RunSettings",
    "SettingsFile",
    "differences",
    "list_recipes",
    "load_from_python",
    "load_settings",
    "module_folders",
    "own_settings",
    "placed",
    "placed_at",
    "plan_run",
    "read_settings_file",
    "settings_as_toml",
    "settings_reference",
    "simulation_reference",
    "with_decay_end",
    "with_scaled_deadlines",
    "without_training",
]

RUNS = Path("runs")
"""The folder of the runs' folders, where no other is given."""


def load_settings(recipe: str, overrides: Sequence[str] = (), runs: Path = RUNS) -> RunSettings:
    """The settings of a recipe or file, with command-line overrides laid over it. Raises `SettingsError`.

    With `resume` they lie over those of the run of that name in `runs`, together with what was edited in the file.

    >>> load_settings("quickstart", ["--max_steps", "3"]).max_steps
    3
    """
    given = parse_overrides(overrides, RunSettings)
    return _resolved(_places(read_settings_file(recipe), given), given, runs)


def load_from_python(
    given: Mapping[str, Any] | str, changes: Mapping[str, Any], runs: Path = RUNS
) -> tuple[RunSettings, Places]:
    """Like `load_settings`, of a recipe, a file or a table, with what `changes` says by dotted name or in tables.

    >>> load_from_python("quickstart", {"max_steps": 3, "trainer": {"threads": 2}})[0].trainer.threads
    2
    """
    file = read_settings_file(given) if isinstance(given, str) else SettingsFile("settings", dict(given))
    overrides = flattened(changes)
    places = _places(file, overrides, "changes")
    return _resolved(places, overrides, runs), places


def _resolved(places: Places, overrides: dict[tuple[str, ...], Any], runs: Path) -> RunSettings:
    table = apply_overrides(places.file.table, overrides)
    if places.file.path != "settings":
        stem = Path(places.file.path).name.removesuffix(".toml")
        name = re.sub(r"[^\w.-]+", "-", stem)  # `my run.toml` becomes `my-run`
        table.setdefault("name", name.lstrip(".-") or "run")
    name = str(table.get("name", "run"))
    if table.get("resume") is True and (own := resumed_file(runs / name, places.file)) is not None:
        of_this_start = {key: table[key] for key in ("resume", "allow_changed_settings") if key in table}
        table = apply_overrides(own.table, overrides) | of_this_start | {"name": name}
        places = replace(places, file=own)
    return validated(RunSettings, table, places)


@contextmanager
def placed(recipe: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Use settings: modules beside their file are found, and errors name their file and line, as in `load_settings`.

    Of a run's own file: those beside the file that it was started with.

    >>> with placed("quickstart", ["--environment.args.max_name", "3"]):
    ...     raise SettingsError("no such argument", key=("environments", 0, "args", "max_name"))
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: command line: no such argument
    """
    with placed_at(_places(read_settings_file(recipe), parse_overrides(overrides, RunSettings))):
        yield


@contextmanager
def placed_at(places: Places) -> Iterator[None]:
    """`placed`, of settings whose places are known."""
    path = Path(places.file.path)
    working_folder()  # which much of what follows asks for
    try:
        with modules_in(*module_folders(path)) if path.suffix == ".toml" else nullcontext():
            yield
    except SettingsError as error:
        if not error.key:
            raise
        raise type(error)(f"{places.where(error.key)}: {error}") from error


def _places(file: SettingsFile, overrides: Iterable[tuple[str, ...]], given_by: str = COMMAND_LINE) -> Places:
    """`--environment.*` and `--environments.0.*` are the same key of the tables."""
    given: set[Key] = set()
    for first, *rest in overrides:
        parts = ("environments", "0", *rest) if first == "environment" else (first, *rest)
        given.add(tuple(map(as_index, parts)))
    return Places(file, given, given_by)
