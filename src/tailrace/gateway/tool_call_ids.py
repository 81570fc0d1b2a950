"""Ids of tool calls: unique in a conversation for clients, as the model's renderer made them for the policy.

Renderers number the calls of one reply, so that every reply has a `call_0`; clients match results to calls by them. The
answer's id goes with them, and comes off when they are sent back.
"""

from __future__ import annotations

import re

import msgspec

from tailrace.records import Message, Reply, ToolCall

_DIGITS = 20
_ADDED = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}$")


def with_call_ids(reply: Reply, answer_id: str) -> Reply:
    """The reply, its calls' ids made unique."""
    if not reply.tool_calls:
        return reply
    calls: list[ToolCall] = [
        {**call, "id": f"{call.get('id', 'call')}-{answer_id[:_DIGITS]}"} for call in reply.tool_calls
    ]
    message: Message = {**reply.message, "tool_calls": calls}
    return msgspec.structs.replace(reply, message=message, tool_calls=calls)


def are_of_one_reply(call_id: str, other: str) -> bool:
    """Whether two calls were handed out with the same answer.

    >>> are_of_one_reply("call_0-0123456789abcdef0123", "call_1-0123456789abcdef0123"), are_of_one_reply("a", "a")
    (True, False)
    """
    added = _ADDED.search(call_id)
    return added is not None and other.endswith(added[0])


def without_call_ids(messages: list[Message]) -> list[Message]:
    """Messages that a client sends, with the ids that the policy knows.

    >>> without_call_ids([{"role": "tool", "content": "5", "tool_call_id": "call_0-0123456789abcdef0123"}])
    [{'role': 'tool', 'content': '5', 'tool_call_id': 'call_0'}]
    """
    return [
        _without(message) if "tool_calls" in message or "tool_call_id" in message else message for message in messages
    ]


def _without(message: Message) -> Message:
    changed: Message = {**message}
    if (call_id := message.get("tool_call_id")) is not None:
        changed["tool_call_id"] = _ADDED.sub("", call_id)
    if (calls := message.get("tool_calls")) is not None:
        changed["tool_calls"] = [{**call, "id": _ADDED.sub("", call.get("id", ""))} for call in calls]
    return changed
