"""Turns what pydantic finds wrong into one message per problem that a user can act on."""

from __future__ import annotations

from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tailrace.config.sources import Key, SettingsFile
from tailrace.errors import SettingsError


def explain(error: ValidationError, model: type[BaseModel], file: SettingsFile, overridden: set[Key]) -> SettingsError:
    """Name each key, where it stands, what it should be, and for an unknown one the nearest that exists."""
    return SettingsError("\n".join(_one(problem, model, file, overridden) for problem in error.errors()))


def _one(problem: ErrorDetails, model: type[BaseModel], file: SettingsFile, overridden: set[Key]) -> str:
    key: Key = tuple(problem["loc"])
    where = "command line" if any(key[: len(given)] == given for given in overridden) else file.where(key)
    name = dotted(key)
    match problem["type"]:
        case "extra_forbidden":
            return f"{where}: {_unknown(key, model)}"
        case "missing":
            return f"{where}: {name} is missing; add it, or give --{name} on the command line"
        case "value_error":
            message = str(problem.get("ctx", {}).get("error", problem["msg"]))
            return f"{where}: {message}"
        case _:
            return f"{where}: {name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def dotted(key: Key) -> str:
    """A key as users write it.

    >>> dotted(("environments", 0, "name"))
    'environments.0.name'
    """
    return ".".join(map(str, key))


def _unknown(key: Key, model: type[BaseModel]) -> str:
    section = _section(model, key[:-1])
    names = sorted(section.model_fields) if section else []
    close = get_close_matches(str(key[-1]), names, n=1, cutoff=0.5)
    elsewhere = [] if close else _find_elsewhere(str(key[-1]), model)
    if close:
        hint = f"did you mean {dotted((*key[:-1], close[0]))}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        hint = f"known here: {', '.join(names)}"
    return f"{dotted(key)} is no setting; {hint}"


def _section(model: type[BaseModel], path: Key) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int) or current is None:
            continue
        field = current.model_fields.get(part)
        current = _model_in(field.annotation) if field else None
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, UnionType, tuple, list}:
        return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
    return None


def _find_elsewhere(name: str, model: type[BaseModel]) -> list[str]:
    """Settings of that name in other sections: `learning_rate` at the top level is `trainer.learning_rate`."""
    found = [name] if name in model.model_fields else []
    for section, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner and name in inner.model_fields:
            found.append(f"{'environment' if section == 'environments' else section}.{name}")
    return found
