"""Every setting of a run: typed, documented, with units.

A recipe or TOML file and `--dotted.overrides` flow in, one frozen `RunSettings` flows out, or a `SettingsError` that
names the key, the line and the nearest valid name. Each part owns the class of its own section; nothing here acts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from tailrace.config.overrides import apply_overrides, parse_overrides
from tailrace.config.plan import Plan, plan_run
from tailrace.config.problems import explain
from tailrace.config.reference import settings_reference
from tailrace.config.settings import Placement, RunSettings
from tailrace.config.sources import Key, list_recipes, read_settings_file

__all__ = [
    "Placement",
    "Plan",
    "RunSettings",
    "list_recipes",
    "load_settings",
    "plan_run",
    "settings_reference",
]


def load_settings(recipe: str, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a recipe or file, with command-line overrides laid over it.

    Raises `SettingsError`.

    >>> load_settings("quickstart", ["--max_steps", "3"]).max_steps
    3
    """
    file = read_settings_file(recipe)
    given = parse_overrides(overrides)
    table = apply_overrides(file.table, given)
    table.setdefault("name", _name_of(recipe))
    overridden = {_as_located(key) for key in given}
    try:
        return RunSettings.model_validate(table)
    except ValidationError as error:
        raise explain(error, RunSettings, file, overridden) from None


def _name_of(recipe: str) -> str:
    """A run's name after its recipe or file: `my run.toml` becomes `my-run`."""
    return re.sub(r"[^\w.-]+", "-", Path(recipe).name.removesuffix(".toml")).lstrip(".-") or "run"


def _as_located(key: tuple[str, ...]) -> Key:
    """An overridden key as it stands in the tables."""
    if key[0] == "environment":
        return ("environments", 0, *key[1:])
    return tuple(int(part) if part.isdigit() else part for part in key)
