from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from tailrace.records import FinishReason
from tailrace.rollouts import ChatRenderer
from tests.support.scripted_generate import Sampled
from tests.support.served_policies import Served, served, user

ADD: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALLS = (
    'Sums.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"b": 4, "a": 3}}</tool_call>'
)
THOUGHT = "<think>\nIt is Ada.\n</think>\n\nAda"


@pytest.fixture
def hermes(renderer_of: Callable[[str], ChatRenderer]) -> ChatRenderer:
    return renderer_of("hermes")


def client_of(talk: Served, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=talk.endpoint.root_url, api_key=talk.endpoint.key, **options)


def asks(content: Any = "who?", **more: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 50, "messages": [user(content)], **more}


def assert_one_branch(talk: Served) -> None:
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    talk.assert_recorded_as_sampled()


async def test_what_the_client_is_told_is_what_was_sampled_and_recorded(renderer: ChatRenderer) -> None:
    async with served(renderer, [" Ada\n", "Bob"]) as talk, client_of(talk) as client:
        messages: list[Any] = [user("who?")]
        system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        first = await client.messages.create(model="any", max_tokens=50, system=system, messages=messages)
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        ]
        second = await client.messages.create(model="any", max_tokens=50, system="Be brief.", messages=messages)
    start, end = talk.rollout.branches[0].completion_spans[0]
    assert [block.to_dict() for block in first.content] == [{"type": "text", "text": " Ada\n"}]
    assert first.stop_reason == "end_turn"
    assert (first.usage.input_tokens, first.usage.output_tokens) == (start, end - start)
    assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "Bob"}]
    assert talk.prompt(0).startswith("<|im_start|>system\nBe brief.")
    assert_one_branch(talk)


@pytest.mark.parametrize("streams", [False, True])
async def test_parallel_calls_go_out_and_their_results_come_back_on_one_branch(
    hermes: ChatRenderer, streams: bool
) -> None:
    async with served(hermes, [CALLS, CALLS, "7"]) as talk, client_of(talk) as client:
        messages: list[Any] = [user("1 + 2, 3 + 4?")]
        seen: list[str] = []
        for turn in range(3):
            asked: dict[str, Any] = {"model": "any", "max_tokens": 99, "tools": [ADD], "messages": messages}
            if streams:
                async with client.messages.stream(**asked) as stream:
                    reply: Any = await stream.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            calls = [block for block in reply.content if block.type == "tool_use"]
            assert reply.stop_reason == ("tool_use" if calls else "end_turn")
            seen += [call.id for call in calls]
            blocks = [{"type": "text", "text": str(call.input["a"] + call.input["b"])} for call in calls]
            results: Any = [
                {"type": "tool_result", "tool_use_id": call.id, "content": [block] if turn else block["text"]}
                for call, block in zip(calls, blocks, strict=True)
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    assert reply.content[0].text == "7"
    assert len(set(seen)) == 4
    assert "<tool_response>\n3\n</tool_response>" in talk.prompt(1)
    assert_one_branch(talk)


async def test_calls_that_no_tool_was_offered_for_are_text(hermes: ChatRenderer) -> None:
    async with served(hermes, [CALLS, "7"], max_tokens=256) as talk, client_of(talk) as client:
        asked: dict[str, Any] = {**asks("1 + 2, 3 + 4?"), "max_tokens": 256}
        first = await client.messages.create(**asked)
        asked["messages"] += [{"role": "assistant", "content": first.content}, user("3, 7.")]
        await client.messages.create(**asked)
    assert [block.to_dict() for block in first.content] == [{"type": "text", "text": CALLS}]
    assert first.stop_reason == "end_turn"
    assert_one_branch(talk)


async def test_calls_with_numbers_that_json_has_not_are_told_as_the_text_that_is_recorded(hermes: ChatRenderer) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": [Infinity], "b": NaN}}</tool_call>'
    async with served(hermes, [call, "7"], max_tokens=256) as talk, client_of(talk) as client:
        asked: dict[str, Any] = {**asks(), "tools": [ADD]}
        first = await client.messages.create(**asked)
        asked["messages"] += [{"role": "assistant", "content": first.content}, user("As JSON, please.")]
        await client.messages.create(**asked)
    assert [block.to_dict() for block in first.content] == [{"type": "text", "text": call}]
    assert talk.rollout.messages[1] == {"role": "assistant", "content": call}
    assert_one_branch(talk)


async def test_a_failed_call_and_what_the_user_says_after_results_are_told(hermes: ChatRenderer) -> None:
    call: Any = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 2}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "no such tool", "is_error": True}
    messages: list[Any] = [
        user("1 + 2?"),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}, {"type": "text", "text": "Now."}]},
    ]
    async with served(hermes) as talk, client_of(talk) as client:
        await client.messages.create(model="any", max_tokens=50, messages=messages)
    assert "Error: no such tool\n</tool_response>" in talk.prompt(0)
    assert "<|im_start|>user\nGo on.\n\nNow.<|im_end|>" in talk.prompt(0)


async def test_text_is_streamed_as_it_comes(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada and Bob"], stepwise=True) as talk, client_of(talk) as client:
        said, sequence = "", []
        talk.generate.allow(2)
        stream = await client.messages.create(**asks(), stream=True)
        async for event in stream:
            sequence.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                said += event.delta.text
                talk.generate.allow(99)
        talk.assert_recorded_as_sampled()
    assert said == "Ada and Bob"
    assert sequence[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert sequence.count("content_block_delta") > 1
    assert sequence[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, None),
        ({"type": "disabled"}, None),
        ({"type": "adaptive"}, "It is Ada."),
        ({"type": "enabled", "budget_tokens": 2000}, "It is Ada."),
        ({"type": "adaptive", "display": "omitted"}, ""),
    ],
)
async def test_thinking_is_shown_to_clients_that_ask_and_may_be_left_out_on_the_way_back(
    hermes: ChatRenderer, thinking: Any, shown: str | None
) -> None:
    asked = {} if thinking is None else {"thinking": thinking}
    async with served(hermes, [THOUGHT, "Bob"]) as talk, client_of(talk) as client:
        first = await client.messages.create(**asks(**asked))
        reply = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
        messages: Any = [user("who?"), reply, user("and?")]
        await client.messages.create(model="any", max_tokens=50, messages=messages, **asked)
    blocks = [block.to_dict() for block in first.content]
    assert [block["thinking"] for block in blocks if block["type"] == "thinking"] == [
        one for one in [shown] if one is not None
    ]
    assert blocks[-1] == {"type": "text", "text": "Ada"}
    assert_one_branch(talk)


@pytest.mark.parametrize("streams", [False, True])
async def test_why_a_reply_ended_is_told(renderer: ChatRenderer, streams: bool) -> None:
    cut = Sampled(renderer.tokenizer.encode("Ada and"), FinishReason.LENGTH)
    found = []
    async with served(renderer, [cut, "Ada. Bob; Cleo", "Ada"]) as talk, client_of(talk) as client:
        for _ in range(3):
            asked = asks(stop_sequences=["; ", ", "])
            if streams:
                async with client.messages.stream(**asked) as stream:
                    reply: Any = await stream.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            found.append((reply.content[0].text, reply.stop_reason, reply.stop_sequence))
    assert found == [
        ("Ada and", "max_tokens", None),
        ("Ada. Bob", "stop_sequence", "; "),
        ("Ada", "end_turn", None),
    ]


async def test_a_prompts_tokens_are_counted_without_a_turn(hermes: ChatRenderer) -> None:
    async with served(hermes) as talk, client_of(talk) as client:
        about: dict[str, Any] = {"model": "any", "system": "Add.", "tools": [ADD], "messages": [user("1 + 2?")]}
        counted = await client.messages.count_tokens(**about)
        assert talk.generate.begun == 0
        reply = await client.messages.create(max_tokens=50, **about)
    assert counted.input_tokens == reply.usage.input_tokens
    assert talk.rollout.turns == 1


async def test_a_conversation_that_ends_with_a_reply_is_counted_too(hermes: ChatRenderer) -> None:
    async with served(hermes) as talk, client_of(talk) as client:
        messages: list[Any] = [user("1 + 2?"), {"role": "assistant", "content": "It is 3."}]
        asked, replied = [await client.messages.count_tokens(model="any", messages=messages[:end]) for end in (1, 2)]
    assert replied.input_tokens > asked.input_tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "any"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{**ADD, "strict": True}]}, "tools[0].strict"),
    ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"top_k": 5}, "top_k"),
    ({"top_k": -1}, "top_k"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"mcp_servers": [{"name": "files"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"best_of": 2}, "best_of"),
    ({"messages": []}, "messages"),
    ({"messages": [user("A"), {"role": "assistant", "content": "B"}]}, "messages"),
    ({"messages": [{"role": "critic", "content": "A"}]}, "messages[0].role"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0]"),  # type: ignore[arg-type]
    ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0]"),  # type: ignore[arg-type]
    ({"messages": [user([{"type": "text", "text": "A", "color": "red"}])]}, "messages[0].content[0].color"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("asked", "parameter"), REFUSED, ids=[str(asked)[:50] for asked, _ in REFUSED])
async def test_what_is_not_supported_is_refused_by_name(
    renderer: ChatRenderer, asked: dict[str, Any], parameter: str
) -> None:
    async with served(renderer) as talk, client_of(talk) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.post("/v1/messages", body=asks(**asked), cast_to=object)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert parameter.rpartition(".")[2] in body["error"]["message"]
    assert talk.generate.begun == 0


async def test_what_claude_code_sends_with_every_request_is_taken(hermes: ChatRenderer) -> None:
    """Its headers, its query, and fields that say nothing of the reply."""
    body = asks(
        metadata={"user_id": "me"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        thinking={"type": "adaptive"},
        tools=[{**ADD, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        stream=True,
    )
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24"}
    async with served(hermes) as talk, httpx.AsyncClient(timeout=30) as client:
        url = f"{talk.endpoint.root_url}/v1/messages?beta=true"
        response = await client.post(url, json=body, headers={"x-api-key": talk.endpoint.key, **headers})
    assert response.status_code == 200
    assert "message_stop" in response.text


async def test_errors_have_the_form_that_the_client_knows(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada"], max_turns=1) as talk:
        async with anthropic.AsyncAnthropic(base_url=talk.endpoint.root_url, api_key="mine") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asks())
        async with client_of(talk) as client:
            await client.messages.create(**asks())
            assert (await client.messages.create(**asks())).stop_reason == "max_tokens"
            with pytest.raises(anthropic.RateLimitError, match="max_turns"):
                await client.messages.create(**asks())
