from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tailrace.records import FinishReason
from tailrace.rollouts import ChatRenderer
from tests.support.scripted_generate import Sampled
from tests.support.served_policies import Served, served

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
CALLS = (
    'Sums.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"b": 4, "a": 3}}</tool_call>'
)
THOUGHT = "<think>\nIt is Ada.\n</think>\n\nAda"


@pytest.fixture
def hermes(renderer_of: Callable[[str], ChatRenderer]) -> ChatRenderer:
    return renderer_of("hermes")


def client_of(talk: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=talk.endpoint.openai_url, api_key=talk.endpoint.key, **options)


def assert_one_branch(talk: Served) -> None:
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    talk.assert_recorded_as_sampled()


async def test_what_the_client_is_told_is_what_was_sampled_and_recorded(renderer: ChatRenderer) -> None:
    async with served(renderer, [" Ada\n", "Bob"]) as talk, client_of(talk) as client:
        asked: list[Any] = [{"role": "user", "content": "who?"}]
        first = await client.responses.create(model="any", instructions="Be brief.", input=asked)
        asked += [*first.output, {"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]
        second = await client.responses.create(model="any", instructions="Be brief.", input=asked)
    start, end = talk.rollout.branches[0].completion_spans[0]
    assert (first.output_text, first.status) == (" Ada\n", "completed")
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens) == (start, end - start)
    assert second.output_text == "Bob"
    assert talk.prompt(0).startswith("<|im_start|>system\nBe brief.")
    assert_one_branch(talk)


@pytest.mark.parametrize("streams", [False, True])
async def test_parallel_calls_go_out_and_their_results_come_back_on_one_branch(
    hermes: ChatRenderer, streams: bool
) -> None:
    async with served(hermes, [CALLS, CALLS, "7"]) as talk, client_of(talk) as client:
        items: list[Any] = [{"role": "user", "content": "1 + 2, 3 + 4?"}]
        seen: list[str] = []
        for _ in range(3):
            asked: dict[str, Any] = {"model": "any", "input": items, "tools": [ADD]}
            if streams:
                async with client.responses.stream(**asked) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked)
            items += response.output
            for call in (item for item in response.output if item.type == "function_call"):
                seen.append(call.call_id)
                numbers = json.loads(call.arguments)
                output = str(numbers["a"] + numbers["b"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert response.output_text == "7"
    assert len(set(seen)) == 4
    assert "<tool_response>\n3\n</tool_response>" in talk.prompt(1)
    assert_one_branch(talk)


async def test_results_may_stand_between_the_calls_of_one_reply(hermes: ChatRenderer) -> None:
    async with served(hermes, [CALLS, CALLS, "7"]) as talk, client_of(talk) as client:
        items: list[Any] = [{"role": "user", "content": "1 + 2, 3 + 4?"}]
        for _ in range(3):
            response = await client.responses.create(model="any", input=items, tools=[ADD])
            for item in response.output:
                items.append(item)
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "3"})
    assert response.output_text == "7"
    assert_one_branch(talk)


async def test_a_call_is_of_its_own_reply_and_not_of_a_message_before_it(hermes: ChatRenderer) -> None:
    """Whatever tells them apart: the id of an earlier answer, or that the message stands for the conversation."""
    calls = CALLS.removeprefix("Sums.")
    async with served(hermes, ["I add.", calls, "7", calls, "7", CALLS, "7"]) as talk, client_of(talk) as client:
        asked: dict[str, Any] = {"model": "any", "tools": [ADD]}
        question: Any = {"role": "user", "content": "1 + 2, 3 + 4?"}
        first = await client.responses.create(input=[question], **asked)
        for items in ([question, *first.output], [{"role": "assistant", "content": "You add 1 to 2, and 3 to 4."}]):
            for _ in range(2):
                response = await client.responses.create(input=items, **asked)
                items.extend(response.output)
                items.extend(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
                    for item in response.output
                    if item.type == "function_call"
                )
            assert response.output_text == "7"
        task: Any = {"role": "system", "content": "Add 1 to 2, and 3 to 4."}
        _, *own_calls = (await client.responses.create(input=[task], **asked)).output
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in own_calls]
        items = [task, {"role": "assistant", "content": "Sums."}, *own_calls, *results]
        assert (await client.responses.create(input=items, **asked)).output_text == "7"
    assert [len(branch.completion_spans) for branch in talk.rollout.branches] == [3, 2, 2]
    talk.assert_recorded_as_sampled()


async def test_calls_that_no_tool_was_offered_for_are_text(hermes: ChatRenderer) -> None:
    async with served(hermes, [CALLS, "7"], max_tokens=256) as talk, client_of(talk) as client:
        items: list[Any] = [{"role": "user", "content": "1 + 2, 3 + 4?"}]
        first = await client.responses.create(model="any", input=items)
        items += [*first.output, {"role": "user", "content": "3, 7."}]
        await client.responses.create(model="any", input=items)
    assert first.output_text == CALLS
    assert_one_branch(talk)


async def test_text_is_streamed_as_it_comes(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada and Bob"], stepwise=True) as talk, client_of(talk) as client:
        said, sequence = "", []
        talk.generate.allow(2)
        stream = await client.responses.create(model="any", input="who?", stream=True)
        async for event in stream:
            sequence.append(event.type)
            if event.type == "response.output_text.delta":
                said += event.delta
                talk.generate.allow(99)
        talk.assert_recorded_as_sampled()
    assert said == "Ada and Bob"
    assert sequence[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert sequence.count("response.output_text.delta") > 1
    assert sequence[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_request_may_follow_a_response_in_place_of_repeating_the_conversation(hermes: ChatRenderer) -> None:
    async with served(hermes, [CALLS, "3 and 7", "You are welcome."]) as talk, client_of(talk) as client:
        asked: dict[str, Any] = {"model": "any", "tools": [ADD], "instructions": "Add."}
        first = await client.responses.create(input="1 + 2, 3 + 4?", **asked)
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(input=outputs, previous_response_id=first.id, **asked)
        third = await client.responses.create(input="Thanks", previous_response_id=second.id, **asked)
    assert third.output_text == "You are welcome."
    assert third.previous_response_id == second.id
    assert_one_branch(talk)


async def test_what_was_not_stored_cannot_be_followed(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk, client_of(talk) as client:
        response = await client.responses.create(model="any", input="who?", store=False)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            await client.responses.create(model="any", input="and?", previous_response_id=response.id)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, ("content", "summary")),
        ({}, ()),
        ({"include": ["reasoning.encrypted_content"]}, ("encrypted_content", "summary")),
        ({"reasoning": {"summary": "auto"}}, ("summary",)),
    ],
)
async def test_reasoning_goes_out_and_comes_back_in_any_form(
    hermes: ChatRenderer, asked: dict[str, Any], kept: tuple[str, ...]
) -> None:
    async with served(hermes, [THOUGHT, "Bob"]) as talk, client_of(talk) as client:
        first = await client.responses.create(model="any", input="who?", **asked)
        reasoning, message = (item.to_dict() for item in first.output)
        thoughts = [*reasoning["content"], *reasoning["summary"]]
        items: list[Any] = [{"role": "user", "content": "who?"}]
        if kept:
            items.append({name: value for name, value in reasoning.items() if name in ("type", "id", *kept)})
        items += [message, {"role": "user", "content": "and?"}]
        await client.responses.create(model="any", input=items, **asked)
    assert [one["text"] for one in thoughts] == ["It is Ada."]
    assert first.output_text == "Ada"
    assert_one_branch(talk)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_that_is_cut_is_incomplete(renderer: ChatRenderer, streams: bool) -> None:
    cut = Sampled(renderer.tokenizer.encode("Ada and"), FinishReason.LENGTH)
    async with served(renderer, [cut]) as talk, client_of(talk) as client:
        if streams:
            events = [event async for event in await client.responses.create(model="any", input="who?", stream=True)]
            assert events[-1].type == "response.incomplete"
            response: Any = events[-1].response
        else:
            response = await client.responses.create(model="any", input="who?")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Ada and"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "add"}, "tools": [ADD]}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "namespace", "name": "more", "tools": [ADD]}]}, "tools[0]"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"text": {"format": {"type": "json_schema", "name": "it", "schema": {}}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "concise"}}, "reasoning"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "1"}, "previous_response_id"),
    ({"metadata": "mine"}, "metadata"),
    ({"best_of": 2}, "best_of"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}]}, "input"),
    ({"input": [{"role": "critic", "content": "A"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "A", "name": "me"}]}, "input[0].name"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
]


@pytest.mark.parametrize(("asked", "parameter"), REFUSED, ids=[str(asked)[:50] for asked, _ in REFUSED])
async def test_what_is_not_supported_is_refused_by_name(
    renderer: ChatRenderer, asked: dict[str, Any], parameter: str
) -> None:
    async with served(renderer) as talk, client_of(talk) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"model": "any", "input": "who?", **asked}, cast_to=object)
    assert refused.value.param == parameter
    assert parameter.partition("[")[0].rpartition(".")[2] in refused.value.message
    assert talk.generate.begun == 0


async def test_what_says_nothing_of_the_reply_changes_nothing(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk, client_of(talk) as client:
        response = await client.responses.create(
            model="any",
            input="who?",
            tool_choice="auto",
            parallel_tool_calls=True,
            truncation="disabled",
            metadata={"run": "1"},
            prompt_cache_key="turn",
            safety_identifier="me",
            service_tier="auto",
            text={"format": {"type": "text"}},
        )
    assert response.output_text == "Ada"
    assert response.metadata == {"run": "1"}


async def test_errors_have_the_form_that_the_client_knows(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada"], max_turns=1) as talk:
        async with openai.AsyncOpenAI(base_url=talk.endpoint.openai_url, api_key="mine") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model="any", input="who?")
        async with client_of(talk) as client:
            await client.responses.create(model="any", input="who?")
            exhausted = await client.responses.create(model="any", input="who?")
            assert (exhausted.status, exhausted.output_text) == ("incomplete", "")
            follows: dict[str, Any] = {"previous_response_id": exhausted.id}
            for more in ({}, follows):
                with pytest.raises(openai.RateLimitError, match="max_turns"):
                    await client.responses.create(model="any", input="who?", **more)
