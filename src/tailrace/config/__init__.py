"""Every setting of a run: typed, documented, with units.

A recipe or TOML file and `--dotted.overrides` flow in, one frozen `RunSettings` flows out, or a `SettingsError` that
names the key, the line and the nearest valid name. Each part owns the class of its own section; nothing here acts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tailrace.config.overrides import apply_overrides, parse_overrides
from tailrace.config.plan import Plan, plan_run
from tailrace.config.problems import validated
from tailrace.config.reference import settings_reference, simulation_reference
from tailrace.config.settings import RunSettings
from tailrace.config.sources import Key, Places, SettingsFile, list_recipes, read_settings_file
from tailrace.errors import SettingsError
from tailrace.user_code import modules_beside

__all__ = [
    "Plan",
    "RunSettings",
    "list_recipes",
    "load_settings",
    "placed",
    "plan_run",
    "settings_reference",
    "simulation_reference",
]


def load_settings(recipe: str, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a recipe or file, with command-line overrides laid over it. Raises `SettingsError`.

    >>> load_settings("quickstart", ["--max_steps", "3"]).max_steps
    3
    """
    file = read_settings_file(recipe)
    table = apply_overrides(file.table, parse_overrides(overrides))
    name = re.sub(r"[^\w.-]+", "-", Path(recipe).name.removesuffix(".toml"))  # `my run.toml` becomes `my-run`
    table.setdefault("name", name.lstrip(".-") or "run")
    return validated(RunSettings, table, _places(file, overrides))


@contextmanager
def placed(recipe: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Use settings: modules beside their file are found, and errors name their file and line, as in `load_settings`.

    >>> with placed("quickstart", ["--environment.args.max_name", "3"]):
    ...     raise SettingsError("no such argument", key=("environments", 0, "args", "max_name"))
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: command line: no such argument
    """
    path = Path(recipe)
    try:
        with modules_beside(path) if path.suffix == ".toml" else nullcontext():
            yield
    except SettingsError as error:
        if not error.key:
            raise
        where = _places(read_settings_file(recipe), overrides).where(error.key)
        raise SettingsError(f"{where}: {error}") from error


def _places(file: SettingsFile, overrides: Sequence[str]) -> Places:
    """`--environment.*` and `--environments.0.*` are the same key of the tables."""
    given: set[Key] = set()
    for first, *rest in parse_overrides(overrides):
        parts = ("environments", "0", *rest) if first == "environment" else (first, *rest)
        given.add(tuple(int(part) if part.isdigit() else part for part in parts))
    return Places(file, given)
