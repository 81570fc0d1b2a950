"""Whatever a client sends: a body is read, or refused with a sentence; nothing else happens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.messages import Messages
from tailrace.gateway.dialects.protocol import ChatRequest, RequestInvalid
from tailrace.gateway.dialects.responses import Responses
from tailrace.records import Json

SCHEMA = {"type": "object", "properties": {}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT: dict[str, Json] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "max_tokens": 9,
    "stop": ["."],
    "stream_options": {"include_usage": True},
    "temperature": 1,
}
RESPONSES: dict[str, Json] = {
    "model": "policy",
    "instructions": "Add.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
    "tool_choice": "auto",
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": "resp_1",
    "max_output_tokens": 9,
}
MESSAGES: dict[str, Json] = {
    "model": "policy",
    "system": [{"type": "text", "text": "Add."}],
    "messages": [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}],
        },
    ],
    "tools": [{"name": "add", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "stop_sequences": ["."],
    "output_config": {"effort": "high"},
    "max_tokens": 9,
}
ANYTHING: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(["", "auto", "text"]),
    lambda inside: (
        st.lists(inside, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name"]), inside, max_size=2)
    ),
    max_leaves=4,
)
READERS: dict[str, tuple[Callable[[Mapping[str, Json]], ChatRequest], dict[str, Json]]] = {
    "chat": (ChatCompletions().read, CHAT),
    "responses": (Responses().read, RESPONSES),
    "messages": (Messages().read, MESSAGES),
    "count_tokens": (Messages().read_prompt, MESSAGES),
}


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Json]) -> dict[str, Json]:
    """The body with one value in it, however deep, that is something else, or not there."""
    result = copy.deepcopy(body)
    inside: Any = result
    while True:
        places = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        place = draw(st.sampled_from(places))
        if not inside[place] or not isinstance(inside[place], dict | list) or draw(st.booleans()):
            break
        inside = inside[place]
    if draw(st.booleans()):
        inside[place] = draw(ANYTHING)
    else:
        del inside[place]
    return result


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_it_is_read_or_refused(name: str, data: st.DataObject) -> None:
    read, body = READERS[name]
    assert read(body).messages
    with contextlib.suppress(RequestInvalid):
        request = read(data.draw(changed(body)))
        assert request.messages
        assert all(isinstance(message["content"], str) for message in request.messages)
