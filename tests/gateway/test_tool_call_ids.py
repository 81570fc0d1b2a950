from __future__ import annotations

import msgspec

from tailrace.gateway.tool_call_ids import with_call_ids, without_call_ids
from tailrace.records import Message, ToolCall
from tests.support.answering_dialect import reply


def test_calls_of_one_id_in_a_reply_have_ids_of_their_own_which_come_off_again() -> None:
    """Kimi writes the ids of its calls itself."""
    calls: list[ToolCall] = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": {}}}
        for name in ("functions.add:0", "functions.add:0", "functions.add:1", "functions.add:0")
    ]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    said = msgspec.structs.replace(reply(), message=message, tool_calls=calls)
    handed_out = with_call_ids(said, "0123456789abcdef" * 2)
    ids = [call["id"] for call in handed_out.tool_calls]
    results: list[Message] = [{"role": "tool", "content": "5", "tool_call_id": call_id} for call_id in ids]
    assert len(set(ids)) == 4
    assert without_call_ids([handed_out.message]) == [message]
    assert [result["tool_call_id"] for result in without_call_ids(results)] == [call["id"] for call in calls]
