"""A tool's description for the policy, read from a Python function: signature, type hints and Google docstring.

    def increment(step: int) -> int:             {"name": "increment",
        '''Increment the counter.                 "description": "Increment the counter.",
                                                  "parameters": {"type": "object",
        Args:                                       "properties": {"step": {"type": "integer",
            step: Value to add.                                             "description": "Value to add."}},
        '''                                         "required": ["step"]}}

The result is what `transformers.utils.get_json_schema` gives for the same function, without importing transformers.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tailrace.errors import SettingsError
from tailrace.records import Json, ToolSpec

_BASIC: dict[object, dict[str, Json]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_spec(function: Callable[..., Any]) -> ToolSpec:
    """What the policy is told of a function; the `self` of a method is left out.

    Raises `SettingsError` naming the function where it has no docstring, or an argument has no type hint, no
    description, or a type that JSON has no word for.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not (docstring := inspect.getdoc(function)):
        raise SettingsError(f"tool {name} has no docstring, which tells the policy what it is for")
    description, descriptions = _parts(docstring)
    hints, properties, required = _hints(function, name), {}, []
    for parameter in _parameters(function):
        what = f"argument {parameter.name!r} of tool {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(f"{what} stands for any number of arguments; a tool names each of its own")
        if parameter.name not in hints:
            raise SettingsError(f"{what} has no type hint, from which the policy learns what to write")
        if parameter.name not in descriptions:
            raise SettingsError(f"{what} is not described under `Args:` in its docstring")
        properties[parameter.name] = _described(type_schema(hints[parameter.name], what), descriptions[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Json] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return ToolSpec(name=function.__name__, description=description, parameters=parameters)


def type_schema(annotation: Any, what: str) -> dict[str, Json]:
    """The JSON Schema of a type hint. Raises `SettingsError` beginning with `what` where it has none.

    >>> type_schema(list[int], "it"), type_schema(int | None, "it"), type_schema(Literal["a", "b"], "it")
    ({'type': 'array', 'items': {'type': 'integer'}}, {'type': 'integer', 'nullable': True}, \
{'type': 'string', 'enum': ['a', 'b']})
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return _values_schema([member.value for member in annotation], what)
    if origin is Literal:
        return _values_schema(list(arguments), what)
    if origin in (Union, types.UnionType):
        return _union_schema(arguments, what)
    if origin is list:
        return {"type": "array", "items": type_schema(arguments[0], what)}
    if origin is tuple and ... not in arguments and len(arguments) > 1:
        return {"type": "array", "prefixItems": [type_schema(one, what) for one in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], what)}
    if origin is None and isinstance(annotation, type | type(Any)) and annotation in _BASIC:
        return dict(_BASIC[annotation])
    raise SettingsError(f"{what} has the type {annotation!r}, which cannot be written as a JSON Schema")


def _values_schema(values: list[Any], what: str) -> dict[str, Json]:
    if not values or any(type(value) not in (int, float, str, bool, type(None)) for value in values):
        raise SettingsError(f"{what} takes one of {values!r}; needed are numbers, text, truth values or None")
    kinds = list(dict.fromkeys(_BASIC[type(value)]["type"] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union_schema(arguments: tuple[Any, ...], what: str) -> dict[str, Json]:
    options = [type_schema(one, what) for one in arguments if one is not type(None)]
    kinds = sorted({option["type"] for option in options if isinstance(option.get("type"), str)})
    if len(options) == 1:
        schema = options[0]
    elif all(option.keys() == {"type"} and isinstance(option["type"], str) for option in options):
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": options}
    return {**schema, "nullable": True} if type(None) in arguments else schema


def _described(schema: dict[str, Json], description: str) -> dict[str, Json]:
    """The schema with its description, of which `(choices: [...])` at the end becomes an enumeration."""
    if choices := _CHOICES.search(description):
        schema["enum"] = [one.strip() if isinstance(one, str) else one for one in json.loads(choices[1])]
        description = description[: choices.start()].strip()
    return {**schema, "description": description}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        return parameters[1:]
    return parameters


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError) as error:
        raise SettingsError(f"tool {name} has a type hint that cannot be resolved: {error}") from error


def _parts(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring's description, and what it tells of each argument."""
    lines = docstring.strip().splitlines()
    heads = [number for number, line in enumerate(lines) if line.strip() in _SECTIONS]
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    starts = [number for number in heads if lines[number].strip() == "Args:"]
    return description, _arguments(lines[starts[0] :]) if starts else {}


def _arguments(lines: list[str]) -> dict[str, str]:
    """From the line `Args:` on: descriptions by name, each with the deeper lines that follow it."""
    outer, inner, descriptions = _indentation(lines[0]), None, dict[str, list[str]]()
    for line in filter(str.strip, lines[1:]):
        depth = _indentation(line)
        if depth <= outer:
            break
        inner = depth if inner is None else inner
        if depth <= inner and (argument := _ARGUMENT.match(line.strip())):
            descriptions[argument[1]] = [argument[2]]
        elif descriptions:
            descriptions[next(reversed(descriptions))].append(line.strip())
    return {name: " ".join(filter(None, parts)).strip() for name, parts in descriptions.items()}


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
