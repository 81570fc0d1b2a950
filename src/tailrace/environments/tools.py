"""Answers a reply's tool calls. Whatever is wrong with a call goes back to the policy as a message, so it can learn."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from types import NoneType
from typing import Final

from tailrace.environments.callables import settled
from tailrace.errors import ToolError
from tailrace.records import Json, Message, Reply, ToolCall, ToolSpec

Tool = Callable[..., str | Awaitable[str]]
"""Takes a call's arguments by keyword, returns what the policy reads; raises `ToolError` to refuse."""

ERROR_PREFIX = "error: "
_TYPES: Final[dict[Json, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (NoneType,),
}
"""What values of JSON Schema's types are in Python, to the letter: True is no number, and 2.0 no integer."""


async def answer_tool_calls(reply: Reply, tools: Mapping[str, Tool], specs: Sequence[ToolSpec] = ()) -> list[Message]:
    """One `tool` message per tool call of the reply, in order; append them after `reply.message`.

    Unknown tools, malformed arguments, missing or unknown ones and a `ToolError` give a message that begins with
    `error: `, and so do arguments of another type than the tool's spec declares, where it is among `specs`. Any other
    exception of a tool is a bug of the tool and fails the rollout.
    """
    declared = {spec["name"]: spec["parameters"] for spec in specs}
    messages = [await _answer(call, tools, declared) for call in reply.tool_calls]
    malformed = f"{ERROR_PREFIX}this tool call is not valid; write JSON with a name and arguments"
    messages += [Message(role="tool", content=malformed) for _ in range(reply.malformed_tool_calls)]
    return messages


async def _answer(call: ToolCall, tools: Mapping[str, Tool], declared: Mapping[str, Json]) -> Message:
    name = call["function"]["name"]
    try:
        content = await _run(name, call["function"]["arguments"], tools, declared.get(name, {}))
    except ToolError as error:
        content = f"{ERROR_PREFIX}{error}"
    message = Message(role="tool", name=name, content=content)
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


async def _run(
    name: str, arguments: Mapping[str, Json] | str, tools: Mapping[str, Tool], schema: Mapping[str, Json]
) -> str:
    if name not in tools:
        raise ToolError(f"there is no tool {name!r}; use one of: {', '.join(tools)}")
    keywords = _keywords(arguments)
    try:
        inspect.signature(tools[name]).bind(**keywords)
    except TypeError as error:
        raise ToolError(f"{name}: {error}") from error
    _require_declared(name, keywords, schema)
    return await settled(tools[name](**keywords))


def _require_declared(name: str, keywords: Mapping[str, Json], schema: Mapping[str, Json]) -> None:
    """Raise `ToolError` for an argument that the schema requires, or declares to be of another type."""
    if missing := [argument for argument in schema.get("required", ()) if argument not in keywords]:
        raise ToolError(f"{name}: missing a required argument: {missing[0]!r}")
    for argument, value in keywords.items():
        kinds = _declared_types(schema.get("properties", {}).get(argument, {}))
        if kinds and not any(type(value) in _TYPES.get(kind, (type(value),)) for kind in kinds):
            raise ToolError(f"{name}: argument {argument!r} must be of type {' or '.join(kinds)}")


def _declared_types(schema: Json) -> list[str]:
    """Empty where it declares them in another way, or not at all: a schema may be true or false."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type", [])
    kinds: list[str] = [declared] if isinstance(declared, str) else declared
    return [*kinds, "null"] if kinds and schema.get("nullable") else kinds


def _keywords(arguments: Mapping[str, Json] | str) -> Mapping[str, Json]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ToolError(f"the arguments are not valid JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ToolError("the arguments must be a JSON object")
    return deepcopy(arguments)  # they are part of the conversation, and tools may change theirs in place
