"""Ids of tool calls: unique in a conversation for clients, as the model's renderer made them for the policy.

Renderers number the calls of one reply, so that every reply has a `call_0`; clients match results to calls by them. The
answer's id goes with them, and comes off when they are sent back. Some models write the ids themselves, and may write
one twice in a reply: the later call's number goes with it, too.
"""

from __future__ import annotations

import re

import msgspec

from tailrace.records import Message, Reply, ToolCall

_DIGITS = 20
_ADDED = re.compile(rf"-([0-9a-f]{{{_DIGITS}}})(-\d+)?$")


def with_call_ids(reply: Reply, answer_id: str) -> Reply:
    """The reply, its calls' ids made unique."""
    if not reply.tool_calls:
        return reply
    calls: list[ToolCall] = []
    seen: set[str] = set()
    for number, call in enumerate(reply.tool_calls):
        call_id = call.get("id", "call")
        again = f"-{number}" if call_id in seen else ""
        seen.add(call_id)
        calls.append({**call, "id": f"{call_id}-{answer_id[:_DIGITS]}{again}"})
    message: Message = {**reply.message, "tool_calls": calls}
    return msgspec.structs.replace(reply, message=message, tool_calls=calls)


def answer_of(call_id: str) -> str | None:
    """How the id of the answer begins that a call was handed out with; None for a call of somebody else's.

    >>> answer_of("call_0-0123456789abcdef0123"), answer_of("call_0-0123456789abcdef0123-1"), answer_of("a")
    ('0123456789abcdef0123', '0123456789abcdef0123', None)
    """
    added = _ADDED.search(call_id)
    return None if added is None else added[1]


def are_of_one_reply(call_id: str, other: str) -> bool:
    """Whether two calls were handed out with the same answer.

    >>> are_of_one_reply("call_0-0123456789abcdef0123", "call_1-0123456789abcdef0123"), are_of_one_reply("a", "a")
    (True, False)
    """
    answer = answer_of(call_id)
    return answer is not None and answer == answer_of(other)


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
