"""Where settings come from: a packaged recipe or a TOML file, and in which line of it each key stands."""

from __future__ import annotations

import importlib.resources
import os
import re
import tomllib
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import Any, TypeAlias

from tailrace.errors import SettingsError
from tailrace.near_names import did_you_mean
from tailrace.records import DEEPEST, is_too_deep

Table: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str | int, ...]

COMMAND_LINE = "command line"
"""Where settings are given beside a file, unless a program gives them."""

_LONGEST_INDEX = 9
_HEADER = re.compile(r"^\s*\[(\[)?\s*([\w.\"'-]+)\s*\]?\]")
_ASSIGNMENT = re.compile(r"^\s*([\w.\"'-]+)\s*=")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A TOML file's table, and the line of each of its keys."""

    path: str
    table: Table
    lines: dict[Key, int] = field(default_factory=dict)

    def is_at(self, path: Path) -> bool:
        """Whether it is the file there."""
        return Path(self.path).resolve() == path.resolve()

    def where(self, key: Key) -> str:
        """`file, line n` of a key or of the nearest table that holds it; the file alone where neither is there."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.path}, line {self.lines[key[:length]]}"
        return self.path


@dataclass(frozen=True, slots=True)
class Places:
    """Where each setting of one file and command line was given."""

    file: SettingsFile
    overridden: set[Key]
    """Keys that were given beside the file."""
    beside: str = COMMAND_LINE
    """Where."""

    def where(self, *keys: Key) -> str:
        """`beside`, if one of the keys or something inside was given there; else the line of the first that has one."""
        overlaps = (all(map(eq, given, key)) for key in keys for given in self.overridden)
        if any(overlaps):  # one lies inside the other: `map` ends with the shorter
            return self.beside
        return self.file.where(next((key for key in keys if key in self.file.lines), keys[0]))


def recipe_folder() -> Path:
    """The folder of the packaged recipes."""
    return Path(str(importlib.resources.files("tailrace") / "recipes"))


def list_recipes() -> dict[str, str]:
    """Packaged recipes and what each says of itself in its first comment."""
    return {
        path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in sorted(recipe_folder().glob("*.toml"))
    }


def read_settings_file(recipe: str) -> SettingsFile:
    """Read a packaged recipe by name, or a TOML file by path. Raises `SettingsError`, with the nearest recipe."""
    path = Path(os.path.expanduser(recipe))
    if path.suffix != ".toml":
        path = recipe_folder() / f"{recipe}.toml"
        if not path.is_file():
            if (own := Path(os.path.expanduser(recipe), "config.toml")).is_file():
                raise SettingsError(f"{recipe!r} is the folder of a run: give {own}, and --resume to go on with it")
            names = list(list_recipes())
            hint = did_you_mean(recipe, names) or "."
            known = f"Recipes: {', '.join(names)}. A file of your own ends in .toml"
            raise SettingsError(f"there is no recipe {recipe!r}{hint} {known}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark
        file = SettingsFile(str(path), tomllib.loads(text), find_lines(text))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8, as TOML is: save it as UTF-8 ({error})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    for name, value in file.table.items():
        begins = next((key for key in file.lines if key[0] == name), (name,))
        require_shallow(value, f"{file.where(begins)}: {name}")
    return file


def require_shallow(value: Any, what: str) -> None:
    """Raise `SettingsError` for a value that nests too deep to be copied. `what` names it, and where it stands."""
    if is_too_deep(value):
        raise SettingsError(f"{what} nests more than {DEEPEST} lists and tables inside each other")


def as_index(part: str) -> str | int:
    """A part of a dotted key as it stands in a `Key`: a number is an index into a list, all else is a name.

    >>> as_index("0"), as_index("name"), as_index("²")
    (0, 'name', '²')
    """
    return int(part) if part.isascii() and part.isdecimal() and len(part) <= _LONGEST_INDEX else part


def find_lines(text: str) -> dict[Key, int]:
    """In which line each key of a TOML text stands, from 1.

    >>> find_lines('name = "a"\\n[[environments]]\\nname = "b"')
    {('name',): 1, ('environments', 0): 2, ('environments', 0, 'name'): 3}
    """
    lines: dict[Key, int] = {}
    counts: dict[str, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            if header[1]:
                counts[header[2]] = counts.get(header[2], -1) + 1
            table = _split(header[2], counts)
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_split(assignment[1], {})), number)
    return lines


def _split(dotted: str, counts: dict[str, int]) -> Key:
    key: list[str | int] = []
    names: list[str] = []
    for part in dotted.split("."):
        names.append(part.strip("\"' "))
        key.append(names[-1])
        if (index := counts.get(".".join(names))) is not None:
            key.append(index)
    return tuple(key)
