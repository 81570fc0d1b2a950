"""Whatever the policy says: a client that streams and one that does not are told the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.messages import Messages
from tailrace.gateway.dialects.responses import Responses
from tailrace.records import FinishReason, Json, Reply
from tests.support.answering_dialect import Answering, reply

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
JSON: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXT,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXT, inside, max_size=3),
    max_leaves=6,
)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """Any reply: text, reasoning, tool calls, and why it ended."""
    finish_reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    stop_string = draw(st.none() | TEXT.filter(bool)) if finish_reason is FinishReason.STOP else None
    return reply(
        draw(TEXT),
        calls=draw(st.lists(st.tuples(NAMES, st.dictionaries(TEXT, JSON, max_size=3)), max_size=3)),
        reasoning=draw(st.none() | TEXT),
        finish_reason=finish_reason,
        stop_string=stop_string,
        tokens=draw(st.integers(0, 9)),
    )


@st.composite
def splits(draw: st.DrawFn) -> Callable[[str], Sequence[str]]:
    """How a text is streamed: in pieces of one size, all of it or only its beginning."""
    size, kept = draw(st.integers(1, 9)), draw(st.floats(0, 1))

    def pieces(text: str) -> Sequence[str]:
        streamed = text[: round(kept * len(text))]
        return [streamed[start : start + size] for start in range(0, len(streamed), size)]

    return pieces


def _openai(answering: Answering) -> openai.OpenAI:
    client = httpx2.Client(transport=answering.transport())
    return openai.OpenAI(api_key="key", base_url="http://gateway/v1", http_client=client)


def _anthropic(answering: Answering) -> anthropic.Anthropic:
    client = httpx2.Client(transport=answering.transport())
    return anthropic.Anthropic(api_key="key", base_url="http://gateway", http_client=client)


@given(said=replies(), pieces=splits(), reasoning=st.sampled_from([{}, {"summary": "auto"}]))
def test_responses(said: Reply, pieces: Callable[[str], Sequence[str]], reasoning: dict[str, Any]) -> None:
    client = _openai(Answering(Responses(), [said], pieces))
    asked: dict[str, Any] = {"model": "policy", "input": "hello", "reasoning": reasoning}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    streamed = last.response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert _without_ids(streamed.to_dict()) == _without_ids(whole.to_dict())
    assert _deltas(events) == _said(whole)
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == _without_parsed([item.to_dict() for item in streamed.output])


@given(
    said=replies(),
    pieces=splits(),
    thinking=st.sampled_from([None, {"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}]),
)
def test_messages(said: Reply, pieces: Callable[[str], Sequence[str]], thinking: Any) -> None:
    client = _anthropic(Answering(Messages(), [said], pieces))
    asked: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "hello"}],
        **({} if thinking is None else {"thinking": thinking}),
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = list(stream)
    streamed = stream.get_final_message()
    assert events[-1].type == "message_stop"
    assert _without_ids(streamed.to_dict()) == _without_ids(whole.to_dict())


@given(said=replies(), pieces=splits())
def test_chat_completions(said: Reply, pieces: Callable[[str], Sequence[str]]) -> None:
    client = _openai(Answering(ChatCompletions(), [said], pieces))
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    message = whole.choices[0].message
    assert "".join(choice.delta.content or "" for choice in choices) == (message.content or "")
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [(call.id, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or []
        if call.type == "function"
    ]
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("empty", [reply(), reply(reasoning="hm")])
def test_a_reply_without_text_and_calls_is_an_empty_text(empty: Reply) -> None:
    """Clients read the first text without looking whether there is one."""
    assert _openai(Answering(Responses(), [empty])).responses.create(model="policy", input="hello").output_text == ""
    message = _anthropic(Answering(Messages(), [empty])).messages.create(
        model="policy", max_tokens=9, messages=[{"role": "user", "content": "hello"}]
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ""}]


def _without_ids(value: Json) -> Json:
    """Without what two answers cannot have in common."""
    return _without(value, "id", "item_id", "signature", *_PARSED)


def _without_parsed(value: Json) -> Json:
    """Without what the package adds."""
    return _without(value, *_PARSED)


_PARSED = ("parsed", "parsed_arguments", "parsed_output")


def _without(value: Json, *names: str) -> Json:
    if isinstance(value, dict):
        return {name: _without(one, *names) for name, one in value.items() if name not in names}
    return [_without(one, *names) for one in value] if isinstance(value, list) else value


def _deltas(events: Sequence[Any]) -> list[str]:
    """What the deltas of each item say."""
    said: dict[int, str] = {}
    for event in events:
        if event.type == "response.output_item.added":
            said[event.output_index] = ""
        elif event.type.endswith(".delta"):
            said[event.output_index] += event.delta
    return [said[index] for index in sorted(said)]


def _said(response: Any) -> list[str]:
    said = []
    for item in response.output:
        if item.type == "function_call":
            said.append(item.arguments)
        else:
            parts = [*(getattr(item, "summary", None) or []), *(item.content or [])]
            said.append("".join(part.text for part in parts))
    return said
