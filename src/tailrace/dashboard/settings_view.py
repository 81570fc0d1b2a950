"""A run's settings as its folder has them: flat, compared with other runs', and with the recipe they were made of."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from tailrace.errors import DataError, SettingsError
from tailrace.guards import guarded, read_at_most
from tailrace.records import Json
from tailrace.reporting.masking import flat, masked

_MOST_BYTES = 1 << 20
_SEEDS = frozenset({"seed", "generator.seed"})


class Change(msgspec.Struct, frozen=True):
    """A setting that is not what the recipe makes of it."""

    name: str
    recipe: str
    run: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting by its dotted name."""

    flat: dict[str, Json] = field(default_factory=dict)
    """As they are, to compare runs by."""
    shown: dict[str, Json] = field(default_factory=dict)
    """As people see them: keys of servers are masked."""
    text_of_file: str = ""

    def text(self, name: str) -> str:
        """A setting that is text; empty where it is not."""
        value = self.flat.get(name)
        return value if isinstance(value, str) else ""

    def integer(self, name: str) -> int | None:
        """A setting that is a whole number."""
        value = self.flat.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def environments(self) -> list[str]:
        """Their names."""
        names = [value for key, value in self.flat.items() if _is_environment_name(key)]
        return [name for name in names if isinstance(name, str)]

    @property
    def tags(self) -> list[str]:
        """Words that the run was given."""
        tags = self.flat.get("observability.tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def family(self) -> str:
        """A digest of all settings but seeds, and those that say how and where a run is started."""
        from tailrace.config import OF_ONE_PLACE, OF_ONE_START

        left_out = _SEEDS | OF_ONE_START | OF_ONE_PLACE
        rest = sorted((key, repr(value)) for key, value in self.flat.items() if key not in left_out)
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(rest)) if self.flat else ""


def _is_environment_name(key: str) -> bool:
    parts = key.split(".")
    return len(parts) == 3 and parts[0] == "environments" and parts[2] == "name"


def read_settings(path: Path) -> Settings:
    """Those of a file; none where there is no such file, or nobody can read it."""
    try:
        with guarded(f"{path} holds no settings", DataError):
            text = read_at_most(path, _MOST_BYTES).decode("utf-8", "replace")
            table = tomllib.loads(text)
            values, shown = _flat(table), masked(table)
            return Settings(values, values if shown == table else _flat(shown), text)
    except DataError:
        return Settings()


def _flat(table: Mapping[str, object]) -> dict[str, Json]:
    """Every value by its dotted name; empty tables say nothing."""
    return {name: _plain(value) for name, value in flat(table).items() if value != {}}


def _plain(value: object) -> Json:
    """TOML has dates, which JSON has not."""
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool) else str(value)


@functools.lru_cache(maxsize=64)
def changes_from_recipe(folder: Path, _stamp: object) -> tuple[Change, ...] | None:
    """Settings that the command line changed; None where the folder does not say what the recipe was.

    `_stamp` changes with the files. Settings of another version of Tailrace are compared as they stand.
    """
    recipe, run = read_settings(folder / "recipe.toml"), read_settings(folder / "config.toml")
    if not recipe.flat or not run.flat:
        return None
    from tailrace.config import RunSettings, differences

    try:
        with guarded("other settings than this version's", SettingsError):
            before, now = (
                RunSettings.model_validate(_without_start(tomllib.loads(settings.text_of_file)))
                for settings in (recipe, run)
            )
            changed = differences(before, now, of_places=True)
            return tuple(Change(one.name, _shown(one.before), _shown(one.now)) for one in changed)
    except SettingsError:
        return tuple(
            Change(name, _shown(recipe.shown[name]), _shown(run.shown[name]))
            for name, value in recipe.flat.items()
            if name in run.flat and run.flat[name] != value and name != "name"
        )


def _without_start(table: dict[str, object]) -> dict[str, object]:
    return {"name": "run", **{key: value for key, value in table.items() if key not in ("resume", "description")}}


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)
