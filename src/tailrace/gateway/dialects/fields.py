"""Fields of requests, read or refused by name: what every dialect needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from tailrace.gateway.dialects.protocol import UNSUPPORTED_VALUE, RequestInvalid
from tailrace.gateway.dialects.tool_calls import json_text
from tailrace.records import DEEPEST, Json, Message, ToolSpec, can_be_sent

ValueT = TypeVar("ValueT")

Neutral: TypeAlias = Mapping[str, tuple[Sequence[Json], str]]
"""By a field's name: the values that change nothing, and why it can have no other."""
LEAVE_IT_OUT = "leave it out"
"""In place of a reason, where a field's name says enough."""
UNMODIFIED = "tokens are trained on under the distribution that they were sampled from, so none may be changed"
"""The reason why penalties and the like cannot be had."""
NO_PARAMETERS: dict[str, Json] = {"type": "object", "properties": {}}


def require_known(
    body: Mapping[str, Json],
    *,
    read: Collection[str],
    neutral: Neutral,
    without_effect: Collection[str] = (),
    within: str = "",
) -> None:
    """Refuse, by name, fields that are none of these; `within` is the place of the object that has them.

    `read` are understood. `neutral` ones may have a value that changes nothing (or be null), and say why they can have
    no other. Those `without_effect` concern somebody else (accounting, caches).

    >>> require_known({"n": 1}, read=(), neutral={"n": ((1,), "ask twice")})
    >>> require_known({"n": 2}, read=(), neutral={"n": ((1,), "ask twice")})
    Traceback (most recent call last):
        ...
    tailrace.gateway.dialects.protocol.RequestInvalid: n = 2 is not supported: ask twice
    """
    for name, value in body.items():
        if name in read or name in without_effect or value is None:
            continue
        place = f"{within}.{name}" if within else name
        if name not in neutral:
            raise RequestInvalid(f"unknown field {place!r}: {LEAVE_IT_OUT}", parameter=place, code="unknown_parameter")
        values, why = neutral[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            message = f"{place} = {shown(value)} is not supported: {why}"
            raise RequestInvalid(message, parameter=place, code=UNSUPPORTED_VALUE)


def shown(value: Json) -> str:
    """A value in a message, not at length.

    >>> shown({"type": "json_schema"})
    '{"type":"json_schema"}'
    """
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def of_type(value: Json, kind: type[ValueT], name: str) -> ValueT:
    """The value as what it must be. Raises `RequestInvalid` where it is something else (a bool is no number)."""
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    raise RequestInvalid(f"{name} must be {_KINDS[kind]}, not {shown(value)}", parameter=name)


def require_sendable(value: Json, name: str) -> None:
    """Refuse what could not go to another process of the run."""
    if not can_be_sent(value):
        why = f"{name} has an integer beyond 64 bits, or more than {DEEPEST // 2} lists and objects inside each other"
        raise RequestInvalid(f"{why}: send it as text", parameter=name)


def optional(body: Mapping[str, Json], name: str, kind: type[ValueT]) -> ValueT | None:
    """A field that may be missing or null."""
    value = body.get(name)
    return None if value is None else of_type(value, kind, name)


def whole_number(body: Mapping[str, Json], name: str, *, least: int) -> int | None:
    """A field that may be missing or null, and otherwise is a whole number, `least` or more."""
    value = optional(body, name, int)
    if value is not None and value < least:
        raise RequestInvalid(f"{name} is {value}; it must be {least} or more", parameter=name)
    return value


def objects(value: Json, name: str) -> list[tuple[str, dict[str, Json]]]:
    """The objects of a list that may be missing, each with its own name."""
    items = [] if value is None else of_type(value, list, name)
    return [(f"{name}[{place}]", of_type(one, dict, f"{name}[{place}]")) for place, one in enumerate(items)]


def number(body: Mapping[str, Json], name: str) -> float | None:
    """A field that may be missing or null, and otherwise is a number."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None if value is None else of_type(value, float, name)
    try:
        return float(value)
    except OverflowError:
        raise RequestInvalid(f"{name} is too large", parameter=name) from None


def vllm_top_k(body: Mapping[str, Json]) -> int | None:
    """vLLM's `top_k`, for which -1 keeps all tokens, as 0 does.

    >>> vllm_top_k({"top_k": -1}), vllm_top_k({"top_k": 5}), vllm_top_k({})
    (0, 5, None)
    """
    value = optional(body, "top_k", int)
    return 0 if value == -1 else value


def stop_strings(value: Json, name: str) -> tuple[str, ...]:
    """One string, or a list of them. Raises `RequestInvalid` for an empty one."""
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else of_type(value, list, name)
    for one in strings:
        if not of_type(one, str, name):
            raise RequestInvalid(f"{name} has an empty string, which ends every reply before it begins", parameter=name)
    return tuple(strings)


def streams_usage(body: Mapping[str, Json]) -> bool:
    """OpenAI's and vLLM's `stream_options`: whether a last event tells the usage."""
    options = optional(body, "stream_options", dict) or {}
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise RequestInvalid(f"stream_options.{name} is not supported", parameter=f"stream_options.{name}")
    return bool(options.get("include_usage"))


def text_of(content: Json, name: str, *, kinds: Collection[str] = ("text",), between: str = "") -> str:
    """The text of a message's content: a string, or a list of text parts, with what stands `between` them.

    Raises `RequestInvalid` for other parts.
    """
    if isinstance(content, str):
        return content
    parts = []
    for place, part in enumerate(of_type(content, list, name)):
        kind = of_type(part, dict, f"{name}[{place}]").get("type")
        if kind not in kinds:
            raise RequestInvalid(
                f"{name}[{place}] is of type {shown(kind)}: the policy reads text only", parameter=f"{name}[{place}]"
            )
        parts.append(of_type(part.get("text"), str, f"{name}[{place}].text"))
    return between.join(parts)


def arguments_of(arguments: Json, name: str) -> dict[str, Json] | str:
    """A tool call's arguments, handed back: an object, or its JSON.

    What is no JSON object is text, and so is one that no other process could be sent, as in sampled calls.
    """
    if isinstance(arguments, dict):
        return arguments if can_be_sent(arguments) else json_text(arguments)
    text = of_type(arguments, str, name)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) and can_be_sent(value) else text


def function_of(tool: Mapping[str, Json], name: str, *, parameters: str = "parameters") -> ToolSpec:
    """A function that the policy may call."""
    schema = tool.get(parameters)
    return {
        "name": of_type(tool.get("name"), str, f"{name}.name"),
        "description": of_type(tool.get("description") or "", str, f"{name}.description"),
        "parameters": NO_PARAMETERS if schema is None else of_type(schema, dict, f"{name}.{parameters}"),
    }


def require_messages(messages: Sequence[Message], name: str) -> None:
    """Raise `RequestInvalid` for a conversation without any."""
    if not messages:
        raise RequestInvalid(f"{name} is empty: give one message at least", parameter=name)


def require_results(messages: Sequence[Message], name: str) -> None:
    """Raise `RequestInvalid` for a conversation that ends with calls; what follows any other reply is a further one."""
    if messages[-1].get("tool_calls"):
        raise RequestInvalid(f"{name} ends with calls of tools: add their results", parameter=name)


_KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
