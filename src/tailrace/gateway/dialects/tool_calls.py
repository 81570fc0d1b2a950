"""Arguments of tool calls as text: an object to the policy, a string of JSON to OpenAI's clients."""

from __future__ import annotations

import msgspec

from tailrace.records import Json, ToolCall

_encode = msgspec.json.Encoder().encode


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as a string of JSON.

    >>> arguments_text({"function": {"name": "add", "arguments": {"a": 1}}})
    '{"a":1}'
    """
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json_text(arguments)


def json_text(value: Json) -> str:
    """A value as JSON.

    >>> json_text({"a": [1, "é"]})
    '{"a":[1,"é"]}'
    """
    return _encode(value).decode()
