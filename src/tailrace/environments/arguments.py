"""Checks `environment.args` against the signature they are meant for, before anything is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tailrace.errors import SettingsError
from tailrace.near_names import did_you_mean
from tailrace.records import Json


def check_arguments(
    target: Callable[..., Any], arguments: Mapping[str, Json], *, owner: str, positional: int = 0, what_else: str = ""
) -> dict[str, Any]:
    """The arguments, converted to the annotated types of `target`; its first `positional` parameters are not for users.

    Raises `SettingsError` where one is unknown (names the nearest), missing (`what_else` may be meant) or of a wrong
    type.

    >>> def factory(names: int, suffix: str = "!") -> None: ...
    >>> check_arguments(factory, {"names": "3"}, owner="demo")
    {'names': 3}
    """
    parameters = list(inspect.signature(target).parameters.values())[positional:]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in arguments:
            if name not in known:
                raise unknown_argument(name, known, owner=owner)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.name in known
        if needed and parameter.name not in arguments:
            said = f"environment.args.{parameter.name} is missing: {owner} needs it{what_else}"
            raise SettingsError(said, key=("name",))
    hints = _type_hints(target)
    return {
        name: convert_argument(name, value, hints[name], owner=owner) if name in known and name in hints else value
        for name, value in arguments.items()
    }


def unknown_argument(name: str, known: list[str], *, owner: str) -> SettingsError:
    """The error for an argument that nobody takes, naming the nearest one that exists."""
    hint = did_you_mean(name, known, cutoff=0.5) or "."
    said = f"environment.args.{name}: {owner} takes no such argument{hint} It takes: {', '.join(known) or 'none'}"
    return SettingsError(said, key=("args", name))


def convert_argument(name: str, value: Json, annotation: Any, *, owner: str) -> Any:
    """The value as the annotated type. Raises `SettingsError` naming the argument and what was expected.

    Nothing of a table or list is told but the place of what is wrong: it may hold keys.
    """
    try:
        converted = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        said = f"environment.args.{name} of {owner} is {value!r}: {problem['msg']}"
        if isinstance(value, dict | list):
            place = ".".join(["environment.args", name, *map(str, problem["loc"])])
            said = f"{place} of {owner}: {problem['msg']}"
        raise SettingsError(said, key=("args", name)) from None
    if isinstance(value, bool) and not isinstance(converted, bool):  # pydantic makes the number 1 of true
        said = f"environment.args.{name} of {owner} is no switch, it needs a value"
        raise SettingsError(said, key=("args", name))
    return converted


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # annotations that only a type checker can resolve: take the values as they are
        return {}
