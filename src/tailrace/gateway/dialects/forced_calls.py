"""Calls that a client forces: `tool_choice` of any tool, or of one.

As with vLLM's own server the engine is guided to JSON, a list of calls that the tools' own schemas allow, and what is
sampled is read as calls. Whether a request may ask for that is what it is for any other form: see `json_form`.

    [{"name": "add", "arguments": {"a": 2, "b": 3}}]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from tailrace.gateway.dialects.fields import shown
from tailrace.gateway.dialects.protocol import UNSUPPORTED_VALUE, JsonForm, RequestInvalid
from tailrace.gateway.dialects.tool_calls import json_text
from tailrace.records import Json, Message, Reply, ToolCall, ToolSpec

Kind: TypeAlias = Literal["auto", "none", "forced"]
_PARAMETER = "tool_choice"
_DEFINITIONS = "$defs"
"""Of a schema: what its references name is looked for at the top of the whole."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


_CALLS = msgspec.json.Decoder(list[_Call])


def openai_choice(choice: Json) -> tuple[Kind, str | None]:
    """What a field of OpenAI's says, and the one tool that it names. Raises `RequestInvalid`.

    >>> openai_choice({"type": "function", "function": {"name": "add"}}), openai_choice("required")
    (('forced', 'add'), ('forced', None))
    """
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        return "forced", None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return "forced", name
    raise refused_choice(choice, "it may be auto, none, required or a function")


def refused_choice(choice: Json, why: str) -> RequestInvalid:
    """For one that nobody could follow."""
    return RequestInvalid(f"{_PARAMETER} = {shown(choice)} is not supported: {why}", parameter=_PARAMETER)


def offered(tools: list[ToolSpec], choice: tuple[Kind, str | None]) -> tuple[list[ToolSpec] | None, JsonForm | None]:
    """Which tools the policy is told of, and the form that forces it to call. Raises `RequestInvalid`."""
    kind, name = choice
    if kind != "forced":
        return (tools or None) if kind == "auto" else None, None
    chosen = [tool for tool in tools if name in (None, tool["name"])]
    if not chosen:
        which = "a tool" if name is None else f"the tool {name!r}"
        raise RequestInvalid(f"{_PARAMETER} forces a call of {which}, and `tools` has none", parameter=_PARAMETER)
    return tools, JsonForm(_schema(chosen, at_most=None if name is None else 1), _PARAMETER, forces_calls=True)


def with_forced_calls(reply: Reply, form: JsonForm | None) -> Reply:
    """The reply with its text read as calls, where they were forced; one that was cut before its end stays text."""
    if form is None or not form.forces_calls or reply.tool_calls:
        return reply
    try:
        read = _CALLS.decode(reply.content)
    except msgspec.DecodeError:
        return reply
    calls = [
        ToolCall(id=f"call_{number}", type="function", function={"name": one.name, "arguments": one.arguments})
        for number, one in enumerate(read)
    ]
    message: Message = {**reply.message, "content": "", "tool_calls": calls}
    return msgspec.structs.replace(reply, message=message, tool_calls=calls)


def _schema(tools: Sequence[ToolSpec], *, at_most: int | None) -> str:
    """Of a list of calls. Raises `RequestInvalid` where two tools mean different things by one definition."""
    definitions: dict[str, Json] = {}
    calls: list[Json] = []
    for tool in tools:
        parameters = {"type": "object", **tool["parameters"]}
        for name, definition in dict(parameters.pop(_DEFINITIONS, {})).items():
            if definitions.setdefault(name, definition) != definition:
                raise RequestInvalid(
                    f"{_PARAMETER} forces a call of tools with different `{_DEFINITIONS}` called {name!r}: rename one",
                    parameter=_PARAMETER,
                    code=UNSUPPORTED_VALUE,
                )
        properties: dict[str, Json] = {"name": {"type": "string", "enum": [tool["name"]]}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {} if at_most is None else {"maxItems": at_most}
    schema: dict[str, Json] = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
    return json_text({**schema, _DEFINITIONS: definitions} if definitions else schema)
