"""Turns what pydantic finds wrong into one message per problem that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tailrace.config.contradictions import Contradictions
from tailrace.config.sources import Key, Places
from tailrace.errors import SettingsError


def explain(error: ValidationError, model: type[BaseModel], given: Places) -> SettingsError:
    """Name each key, where it stands, what it should be, and for an unknown one the nearest that exists."""
    problems = error.errors()
    keys = [tuple(problem["loc"]) for problem in problems]
    formatter = _ProblemFormatter(model, given)
    lines = []
    for problem, key in zip(problems, keys, strict=True):
        inside = any(other[: len(key)] == key and len(other) > len(key) for other in keys)
        if not (problem["type"] == "too_short" and inside):  # a list is short only of the entry that is wrong
            lines += formatter.lines(problem, key)
    return SettingsError("\n".join(lines))


@dataclass(frozen=True, slots=True)
class _ProblemFormatter:
    """Says what is wrong with the settings of one file and command line."""

    model: type[BaseModel]
    given: Places

    def lines(self, problem: ErrorDetails, key: Key) -> list[str]:
        """One line per problem."""
        if problem["type"] == "value_error":
            error = problem["ctx"]["error"]
            if isinstance(error, Contradictions):
                return [f"{self.given.where(*one.keys)}: {one.message}" for one in error.found]
            return [f"{self.given.where(key)}: {error}"]
        return [f"{self.given.where(key)}: {self._what(problem, key)}"]

    def name(self, key: Key) -> str:
        """As users write it: the only environment is `environment`."""
        environments = self.given.file.table.get("environments")
        if key[:2] == ("environments", 0) and (not isinstance(environments, list) or len(environments) < 2):
            key = ("environment", *key[2:])
        return dotted(key)

    def _what(self, problem: ErrorDetails, key: Key) -> str:
        match problem["type"]:
            case "extra_forbidden":
                return self._unknown(key)
            case "missing":
                return f"{self.name(key)} is missing; {_how_to_give(key, _section(self.model, key))}"
            case "model_type" | "model_attributes_type":
                how = _how_to_give(key, _section(self.model, key))
                return f"{self.name(key)} = {problem['input']!r}: it is a section, not a value; {how}"
            case "tuple_type":
                return f"{self.name(key)} = {problem['input']!r}: it is a list; each entry is a table [[{dotted(key)}]]"
            case "string_pattern_mismatch":
                allowed = "use letters, digits, `_`, `-` and `.`, and begin with one of the first three"
                return f"{self.name(key)} = {problem['input']!r} cannot name a folder; {allowed}"
            case _:
                message = problem["msg"][0].lower() + problem["msg"][1:]
                return f"{self.name(key)} = {problem['input']!r}: {message}"

    def _unknown(self, key: Key) -> str:
        section = _section(self.model, key[:-1])
        names = sorted(section.model_fields) if section else []
        close = get_close_matches(str(key[-1]), names, n=1, cutoff=0.66)
        elsewhere = [] if close else _find_elsewhere(str(key[-1]), self.model)
        if close:
            hint = f"did you mean {self.name((*key[:-1], close[0]))}?"
        elif elsewhere:
            hint = f"did you mean {elsewhere[0]}?"
        else:
            hint = f"known {'in ' + self.name(key[:-1]) if key[:-1] else 'here'}: {', '.join(names)}"
        given = [one for one in self.given.overridden if one[: len(key)] == key]
        return f"{self.name(min(given, default=key, key=len))} is no setting; {hint}"


def dotted(key: Key) -> str:
    """As in the tables: `environments.0.name`."""
    return ".".join(map(str, key))


def _how_to_give(key: Key, section: type[BaseModel] | None) -> str:
    """What to write where a key should be, in a file and on the command line."""
    if section is None:
        return f"add it, or give --{dotted(_singular(key))} on the command line"
    first = next((name for name, field in section.model_fields.items() if field.is_required()), "")
    first = first or next(iter(section.model_fields))
    table = "[[environments]]" if key == ("environments",) else f"[{dotted(key)}]"
    return f"write a table {table} with {first} = ..., or give --{dotted((*_singular(key), first))} on the command line"


def _singular(key: Key) -> Key:
    return ("environment", *key[2:]) if key[:1] == ("environments",) else key


def _section(model: type[BaseModel], path: Key) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int) or current is None:
            continue
        field = current.model_fields.get(part)
        current = model_in(field.annotation) if field else None
    return current


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, UnionType, tuple, list}:
        return next((found for part in get_args(annotation) if (found := model_in(part))), None)
    return None


def _find_elsewhere(name: str, model: type[BaseModel]) -> list[str]:
    """Settings of that name in other sections: `learning_rate` at the top level is `trainer.learning_rate`."""
    found = [name] if name in model.model_fields else []
    for section, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner and name in inner.model_fields:
            found.append(f"{'environment' if section == 'environments' else section}.{name}")
    return found
