"""Messages as users write them (the field's chat format), and what a policy answers."""

from __future__ import annotations

import json
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict

import msgspec

from tailrace.records.arrays import Int32Array, as_token_ids
from tailrace.records.completion import Completion, FinishReason

_encode = msgspec.msgpack.Encoder().encode

Json: TypeAlias = Any
"""A value that JSON can hold."""

DEEPEST = 256
"""Lists and objects inside each other that a value may have; to copy twice as many would end at Python's own limit."""


def is_too_deep(value: Json, deepest: int = DEEPEST) -> bool:
    """Whether more than `deepest` lists and objects lie inside each other.

    >>> is_too_deep([[], {"a": [1]}])
    False
    """
    level = [value]
    for _ in range(deepest + 1):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not inside:
            return False
        level = [one for values in inside for one in values]
    return True


def can_be_sent(value: Json) -> bool:
    """Whether a value can go to another process inside of a message, which has some lists and objects as well, and to a
    client as JSON.

    It nests half as deep as a value may at most, and has no integer beyond 64 bits, no half of a character, and no
    number that is infinite or none, all of which Python's `json.loads` takes.

    >>> can_be_sent({"id": 2**64 - 1}), can_be_sent({"id": 2**64}), can_be_sent([float("inf")])
    (True, False, False)
    """
    if is_too_deep(value, DEEPEST // 2):
        return False
    try:
        _encode(value)
        json.dumps(value, allow_nan=False)
    except (OverflowError, ValueError):  # UnicodeEncodeError is a ValueError
        return False
    return True


class ToolCallFunction(TypedDict):
    """Which function a tool call names, and with what arguments."""

    name: str
    arguments: dict[str, Json] | str


class ToolCall(TypedDict, total=False):
    """One tool call of an assistant's message."""

    id: str
    type: Literal["function"]
    function: Required[ToolCallFunction]


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class ToolSpec(TypedDict):
    """A function the policy may call; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: dict[str, Json]


class Reply(msgspec.Struct, frozen=True, eq=False):
    """What the policy answered in one turn."""

    message: Message
    """The assistant's message: append it to the conversation as it is."""
    finish_reason: FinishReason
    completion: Completion
    tool_calls: list[ToolCall] = []
    """Well-formed tool calls only, parsed by the model family's renderer."""
    malformed_tool_calls: int = 0
    """Tool calls that could not be parsed, or not be sent on; their text stays in `content`."""
    branch: int = 0
    """Which of the rollout's `branches` it is on."""
    start_token: int = 0
    """Place of its first token there."""
    stop_string: str | None = None
    """The one of the turn's own strings that ended it, where one did."""
    prompt_token_ids: Int32Array = msgspec.field(default_factory=lambda: as_token_ids([]))
    """What it was sampled after, [start_token]: a view of the branch."""

    @property
    def content(self) -> str:
        """The message's text."""
        return self.message["content"]
