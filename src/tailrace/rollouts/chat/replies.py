"""A reply's tokens read back: text, reasoning, tool calls.

`read_reply` reads the Hermes dialect, which most templates without a hand-written renderer teach, whether or not the
markers are tokens of their own:

    <think>...</think>text<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import json

import msgspec

from tailrace.records import Json, Message, ToolCall, can_be_sent
from tailrace.records.conversation import ToolCallFunction

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
MARKERS = (_THINK, _CALL)
"""Where a reply stops to be plain text."""


class ParsedReply(msgspec.Struct, frozen=True):
    """What a completion says."""

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    """Well-formed ones, in order."""
    malformed_tool_calls: int = 0
    """Attempts that could not be parsed; their text stays in `content`."""

    def message(self) -> Message:
        """As the assistant's message of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


def read_reply(text: str, *, prompt_opens_reasoning: bool = False, reads_calls: bool = True) -> ParsedReply:
    """Split a reply's text (stop token already taken off); unless it `reads_calls` they stay text.

    >>> reply = read_reply('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> reply.tool_calls[0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    >>> read_reply("<tool_call>{broken</tool_call>").malformed_tool_calls
    1
    """
    reasoning, text = _split_reasoning(text, prompt_opens_reasoning)
    if _CALL not in text or not reads_calls:
        return ParsedReply(content=text, reasoning=reasoning)
    kept: list[str] = []
    calls: list[ToolCall] = []
    malformed = 0
    for before, block, closed in _blocks(text):
        kept.append(before)
        call = tool_call(block, number=len(calls)) if closed else None
        if call is not None:
            calls.append(call)
        elif block is not None:
            malformed += 1
            kept.append(_CALL + block + (_END_CALL if closed else ""))
    content = "".join(kept)
    # white space before the text stays, as it does without a call: a client that reads along has it already
    return ParsedReply(content.rstrip() if calls else content, reasoning, calls, malformed)


def tool_call(block: str | None, *, number: int) -> ToolCall | None:
    """The call that a block's JSON describes; None where it is not one."""
    try:
        value: Json = json.loads(block or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return as_tool_call(value.get("name"), value.get("arguments", {}), number=number)


def as_tool_call(name: Json, arguments: Json, *, number: int, call_id: str | None = None) -> ToolCall | None:
    """A tool call of the conversation format; None unless it names a function and its arguments are an object.

    None also for one that no other process could be sent.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    function: ToolCallFunction = {"name": name, "arguments": arguments}
    call: ToolCall = {"id": call_id or f"call_{number}", "type": "function", "function": function}
    return call if can_be_sent(call) else None


def _split_reasoning(text: str, prompt_opens_reasoning: bool) -> tuple[str | None, str]:
    opened = text.lstrip().startswith(_THINK)
    if not opened and not prompt_opens_reasoning:
        return None, text
    inside = text.lstrip()[len(_THINK) :] if opened else text
    reasoning, _, content = inside.partition(_END_THINK)
    return reasoning.strip("\n"), content.lstrip("\n")


def _blocks(text: str) -> list[tuple[str, str | None, bool]]:
    """(text before the block, the block's inside or None after the last one, whether it was closed)."""
    found: list[tuple[str, str | None, bool]] = []
    while True:
        before, opened, rest = text.partition(_CALL)
        if not opened:
            return [*found, (before, None, False)]
        block, closed, text = rest.partition(_END_CALL)
        found.append((before, block, bool(closed)))
        if not closed:
            return found
