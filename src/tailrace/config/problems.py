"""Turns what pydantic finds wrong into one message per problem that a user can act on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tailrace.config.contradictions import Contradictions
from tailrace.config.sections import all_keys, end_of, says_kind, without_tags
from tailrace.config.sources import COMMAND_LINE, Key, Places, Table
from tailrace.errors import SettingsError

ModelT = TypeVar("ModelT", bound=BaseModel)

ELSEWHERE_CALLED = {
    "batch": "scheduling.batch_size",
    "env": "environment.name",
    "epochs": "max_epochs",
    "lr": "trainer.learning_rate",
    "max_completion_length": "rollouts.max_tokens",
    "max_new_tokens": "rollouts.max_tokens",
    "model_name_or_path": "model.name",
    "num_generations": "rollouts.group_size",
    "num_train_epochs": "max_epochs",
    "output_dir": "name",
    "run_name": "name",
    "save_steps": "trainer.checkpoint_every_steps",
    "steps": "max_steps",
}
"""Names of other programs, and of haste, for settings that are called otherwise here."""


_LONGEST_SHOWN = 200
"""Characters of a value that is wrong."""
_NUMBERS_BELOW = 2**63
_NO_NUMBER = "it must be a finite number, smaller than 2^63"


def validated(model: type[ModelT], table: Table, given: Places) -> ModelT:
    """The settings in `table`. Raises `SettingsError` that says all that is wrong with them, and where it stands."""
    formatter = _ProblemFormatter(model, given)
    try:
        settings = model.model_validate(table)
    except ValidationError as error:
        raise SettingsError(formatter.message(error)) from None
    found = [(key, formatter.no_value(key)) for key in _without_value(table, settings)]
    found += [(key, f"{formatter.name(key)} = {number}: {_NO_NUMBER}") for key, number in _out_of_bounds(settings)]
    if found:
        raise SettingsError("\n".join(f"{given.where(key)}: {problem}" for key, problem in found))
    return settings


def _out_of_bounds(settings: Any, key: Key = ()) -> Iterator[tuple[Key, int | float]]:
    """Numbers that are none (`nan`), have no end, or that no message between processes can hold."""
    if isinstance(settings, int | float) and not -_NUMBERS_BELOW <= settings < _NUMBERS_BELOW:
        yield key, settings
    elif isinstance(settings, BaseModel | dict):
        for name, inner in settings.items() if isinstance(settings, dict) else settings:
            yield from _out_of_bounds(inner, (*key, name))
    elif isinstance(settings, list | tuple):
        for index, inner in enumerate(settings):
            yield from _out_of_bounds(inner, (*key, index))


def _without_value(given: Any, settings: Any, key: Key = ()) -> Iterator[Key]:
    """What was given as true or false, of which pydantic made 1 or 0; without a value the command line gives true."""
    if isinstance(given, dict):
        for name, value in given.items():
            inner = settings[name] if isinstance(settings, dict) else getattr(settings, name)
            yield from _without_value(value, inner, (*key, name))
    elif isinstance(given, list):
        for index, (value, inner) in enumerate(zip(given, settings, strict=False)):
            yield from _without_value(value, inner, (*key, index))
    elif isinstance(given, bool) and not isinstance(settings, bool):
        yield key


@dataclass(frozen=True, slots=True)
class _ProblemFormatter:
    """Says what is wrong with the settings of one file and command line."""

    model: type[BaseModel]
    given: Places

    def message(self, error: ValidationError) -> str:
        """A line for each key: where it stands, what it should be, and for an unknown one the nearest that exists."""
        problems = error.errors()
        paths = [tuple(problem["loc"]) for problem in problems]
        lines = []
        for problem, path in zip(problems, paths, strict=True):
            inside = any(other[: len(path)] == path and len(other) > len(path) for other in paths)
            if not (problem["type"] == "too_short" and inside):  # a list is short only of the entry that is wrong
                lines += self.lines(problem, path)
        return "\n".join(lines)

    def lines(self, problem: ErrorDetails, path: Key) -> list[str]:
        """One line per problem. `path` is pydantic's: with the tags of kinds."""
        key = without_tags(self.model, path)
        if problem["type"] == "value_error":
            error = problem["ctx"]["error"]
            if isinstance(error, Contradictions):
                return [f"{self.given.where(*one.keys)}: {one.message}" for one in error.found]
            return [f"{self.given.where(key)}: {error}"]
        if problem["type"] == "union_tag_invalid":
            return [self._unknown_kind(problem, path)]
        return [f"{self.given.where(key)}: {self._what(problem, path, key)}"]

    def name(self, key: Key) -> str:
        """As users write it: the only environment is `environment`."""
        environments = self.given.file.table.get("environments")
        if key[:2] == ("environments", 0) and (not isinstance(environments, list) or len(environments) < 2):
            key = ("environment", *key[2:])
        return dotted(key)

    def no_value(self, path: Key) -> str:
        """For a setting that is true and should be something else."""
        field, key = end_of(self.model, path).field, without_tags(self.model, path)
        default = None if field is None else field.default
        has_example, is_option = isinstance(default, str | int | float), self.given.where(key) == COMMAND_LINE
        example = "VALUE" if not has_example else str(default) if is_option else repr(default)
        shown = f"--{self.name(key)} {example}" if is_option else f"{self.name(key)} = {example}"
        return f"{self.name(key)} is no switch, it needs a value, as in {shown}"

    def _what(self, problem: ErrorDetails, path: Key, key: Key) -> str:
        match problem["type"]:
            case "extra_forbidden":
                return self._unknown(path, key)
            case "missing":
                return f"{self.name(key)} is missing; {self._how_to_give(path, key)}"
            case "model_type" | "model_attributes_type":
                how = self._how_to_give(path, key)
                return f"{self.name(key)} = {_shown(problem)}: it is a section, not a value; {how}"
            case _ if problem["input"] is True:
                return self.no_value(path)
            case "tuple_type":
                return f"{self.name(key)} = {_shown(problem)}: it is a list; {self._entries(path, key)}"
            case "string_pattern_mismatch" if key == ("name",):
                allowed = "use letters, digits, `_`, `-` and `.`, and begin with one of the first three"
                return f"{self.name(key)} = {problem['input']!r} cannot name a folder; {allowed}"
            case _ if isinstance(problem["input"], float) and math.isnan(problem["input"]):
                return f"{self.name(key)} = nan: {_NO_NUMBER}"
            case _:
                message = problem["msg"][0].lower() + problem["msg"][1:]
                return f"{self.name(key)} = {_shown(problem)}: {message}"

    def _how_to_give(self, path: Key, key: Key) -> str:
        """What to write where a key should be, in a file and beside it."""
        section, beside = end_of(self.model, path).section, self.given.beside
        if section is None:
            written, full = "add it", _singular(key)
        else:
            first = next((name for name, field in section.model_fields.items() if field.is_required()), "")
            first = first or next(iter(section.model_fields))
            table = "[[environments]]" if key == ("environments",) else f"[{dotted(key)}]"
            written, full = f"write a table {table} with {first} = ...", (*_singular(key), first)
        given = f"--{dotted(full)} on the {beside}" if beside == COMMAND_LINE else f'"{dotted(full)}" in {beside}'
        return f"{written}, or give {given}"

    def _entries(self, path: Key, key: Key) -> str:
        """How a list is written."""
        if end_of(self.model, path).section is not None:
            return f"each entry is a table [[{dotted(key)}]]"
        if self.given.where(key) == COMMAND_LINE:
            return f'write --{self.name(key)} \'["...", "..."]\''
        return f'write {key[-1]} = ["...", "..."]'

    def _unknown(self, path: Key, key: Key) -> str:
        place, name = end_of(self.model, path[:-1]), str(key[-1])
        names = sorted(place.section.model_fields) if place.section else []
        close = get_close_matches(name, () if name in ELSEWHERE_CALLED else names, n=1, cutoff=0.66)
        meant = self.name((*key[:-1], close[0])) if close else ""
        if not place.is_tag:
            meant = meant or _find_elsewhere(name, self.model)
        known = f"known {'in ' + self.name(key[:-1]) if key[:-1] else 'here'}: {', '.join(names)}"
        given = [one for one in self.given.overridden if one[: len(key)] == key]
        what = f"setting of {place.part}" if place.is_tag else "setting"
        meant = "[[environments]]" if meant == "environments" else meant
        hint = f"did you mean {meant}?" if meant else known
        return f"{self.name(min(given, default=key, key=len))} is no {what}; {hint}"

    def _unknown_kind(self, problem: ErrorDetails, path: Key) -> str:
        kinds = end_of(self.model, path).kinds
        key = (*without_tags(self.model, path), says_kind(kinds))
        given = problem["ctx"]["tag"]
        close = get_close_matches(given, kinds, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = f"known: {', '.join(kinds)}"
        return f"{self.given.where(key)}: {self.name(key)} = {given!r}: there is none of that name; {hint}{known}"


def _shown(problem: ErrorDetails) -> str:
    """What was given, as far as it helps: a program may have given a whole data set."""
    text = repr(problem["input"])
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def dotted(key: Key) -> str:
    """As in the tables: `environments.0.name`."""
    return ".".join(map(str, key))


def _singular(key: Key) -> Key:
    return ("environment", *key[2:]) if key[:1] == ("environments",) else key


def _find_elsewhere(name: str, model: type[BaseModel]) -> str:
    """The settings of that name, or nearly that name, anywhere: `learning_rate` alone is `trainer.learning_rate`."""
    keys = all_keys(model)
    if (meant := ELSEWHERE_CALLED.get(name)) in keys:
        return meant
    close = get_close_matches(name, {key.rpartition(".")[2] for key in keys}, n=1, cutoff=0.8)
    return " or ".join(key for key in keys if close and key.rpartition(".")[2] == close[0])
