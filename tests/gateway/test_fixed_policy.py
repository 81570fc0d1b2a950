"""A policy without a run: answers of a schema are its alone, where its engine guides decoding."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tailrace.config.gateway import GatewaySettings
from tailrace.gateway import Gateway
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.records import Generate, GroupId, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts import ChatRenderer, RolloutPolicy
from tests.support.scripted_generate import ScriptedGenerate
from tests.support.served_policies import user

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
ENCODED = '{"type":"object","properties":{"name":{"type":"string"}}}'
NAMED = {"name": "person", "strict": True, "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}
CHAT = {"model": "m", "messages": [user("who?")]}
RESPONSE = {"model": "m", "input": "who?"}
MESSAGE = {**CHAT, "max_tokens": 9}


@contextlib.asynccontextmanager
async def client_of(
    renderer: ChatRenderer, generate: Generate, settings: GatewaySettings | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    def new_policy(sampling: SamplingParams) -> RolloutPolicy:
        task = Task(TaskId("http/0"), "http", 0, {})
        rollout = Rollout(RolloutId("http#0"), GroupId("http#0"), task, sampling)
        return RolloutPolicy(rollout, renderer=renderer, generate=generate, max_turns=1)

    async with Gateway(settings) as gateway:
        await gateway.serve("key", new_policy)
        headers = {"authorization": "Bearer key"}
        async with httpx.AsyncClient(base_url=gateway.root_url, headers=headers, timeout=30) as client:
            yield client


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": NAMED}}, ENCODED),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, '{"type":"object"}'),
        ("chat/completions", {**CHAT, "response_format": {"type": "text"}}, None),
        ("responses", {**RESPONSE, "text": {"format": {"type": "json_schema", **NAMED}}}, ENCODED),
        ("responses", {**RESPONSE, "text": {"format": {"type": "text"}}}, None),
        ("messages", {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ENCODED),
    ],
)
async def test_a_schema_reaches_the_engine(
    renderer: ChatRenderer, path: str, body: dict[str, Any], schema: str | None
) -> None:
    generate = ScriptedGenerate(renderer.tokenizer, ['{"name":"Ada"}'])
    async with client_of(renderer, generate) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert [call.sampling.json_schema for call in generate.calls] == [schema]
    if path == "responses":
        assert answer.json()["text"] == body["text"]


@pytest.mark.parametrize(("asked", "sampled"), [(-1, 0), (0, 0), (5, 5)])
async def test_a_chat_is_sampled_with_its_own_top_k(renderer: ChatRenderer, asked: int, sampled: int) -> None:
    generate = ScriptedGenerate(renderer.tokenizer, ["Ada"])
    async with client_of(renderer, generate) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "top_k": asked})
    assert answer.status_code == 200, answer.text
    assert [call.sampling.top_k for call in generate.calls] == [sampled]


async def test_clients_that_ask_the_same_keep_their_own_system_messages(renderer: ChatRenderer) -> None:
    generate, systems = ScriptedGenerate(renderer.tokenizer, ["Ada"]), ["Answer in French.", "You are a judge."]
    async with client_of(renderer, generate, GatewaySettings(system_messages="first")) as client:
        for system in systems:
            messages = [{"role": "system", "content": system}, user("who?")]
            await client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    for system, call in zip(systems, generate.calls, strict=True):
        assert system in renderer.text(call.prompt_token_ids.tolist())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "with tools is not supported"),
        ({"response_format": {"type": "grammar"}}, "may be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "any"}}}, "must be an object"),
        ({"tool_choice": "required"}, "forces a call of a tool, and `tools` has none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]},
            "forces a call of the tool 'sub', and `tools` has none",
        ),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "may be auto, none, required or a function"),
        ({"tool_choice": "required", "tools": [TOOL]}, "this engine does not guide decoding"),
        (
            {"response_format": {"type": "json_object"}},
            "this engine does not guide decoding: generator.engine = 'vllm'",
        ),
    ],
)
async def test_what_no_engine_or_this_one_cannot_promise_is_refused_with_the_reason(
    renderer: ChatRenderer, more: dict[str, Any], says: str
) -> None:
    async with (
        Generator(lambda: SimulatedEngine(vocab_size=renderer.tokenizer.num_tokens)) as generator,
        client_of(renderer, generator.generate) as client,
    ):
        refused = await client.post("/v1/chat/completions", json={**CHAT, **more})
    assert (refused.status_code, says in refused.json()["error"]["message"]) == (400, True), refused.text


ADDS = {**SCHEMA, "$defs": {"number": {"type": "integer"}}}
CALLED = '[{"name":"add","arguments":{"name":"Ada"}}]'
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": "add", "parameters": ADDS}}]}
RESPONSE_TOOLS = {"tools": [{"type": "function", "name": "add", "parameters": ADDS}]}
MESSAGE_TOOLS = {"tools": [{"name": "add", "input_schema": ADDS}]}


def call_in(path: str, answer: dict[str, Any]) -> tuple[str, Any, str]:
    """The one call of an answer: its tool, its arguments, and why the reply ended."""
    if path == "chat/completions":
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        return call["function"]["name"], json.loads(call["function"]["arguments"]), choice["finish_reason"]
    if path == "responses":
        (item,) = answer["output"]
        return item["name"], json.loads(item["arguments"]), item["type"]
    (block,) = answer["content"]
    return block["name"], block["input"], answer["stop_reason"]


@pytest.mark.parametrize(
    ("path", "body", "most", "ended"),
    [
        ("chat/completions", {**CHAT, **CHAT_TOOLS, "tool_choice": "required"}, None, "tool_calls"),
        (
            "chat/completions",
            {**CHAT, **CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
            1,
            "tool_calls",
        ),
        ("responses", {**RESPONSE, **RESPONSE_TOOLS, "tool_choice": "required"}, None, "function_call"),
        (
            "responses",
            {**RESPONSE, **RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "add"}},
            1,
            "function_call",
        ),
        ("messages", {**MESSAGE, **MESSAGE_TOOLS, "max_tokens": 99, "tool_choice": {"type": "any"}}, None, "tool_use"),
        (
            "messages",
            {**MESSAGE, **MESSAGE_TOOLS, "max_tokens": 99, "tool_choice": {"type": "tool", "name": "add"}},
            1,
            "tool_use",
        ),
    ],
)
async def test_a_forced_call_is_guided_and_answered_as_a_call(
    renderer_of: Callable[[str], ChatRenderer], path: str, body: dict[str, Any], most: int | None, ended: str
) -> None:
    hermes = renderer_of("hermes")
    generate = ScriptedGenerate(hermes.tokenizer, [CALLED])
    async with client_of(hermes, generate) as client:
        answer = await client.post(f"/v1/{path}", json=body)
        streamed = await client.post(f"/v1/{path}", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert call_in(path, answer.json()) == ("add", {"name": "Ada"}, ended)
    assert '\\"Ada\\"' in streamed.text
    assert '[{\\"name' not in streamed.text  # nothing of the form is sent as text
    for call in generate.calls:
        schema = json.loads(call.sampling.json_schema or "")
        (one,) = schema["items"]["anyOf"]
        assert one["properties"] == {"name": {"type": "string", "enum": ["add"]}, "arguments": SCHEMA}
        assert (schema["minItems"], schema.get("maxItems"), schema["$defs"]) == (1, most, ADDS["$defs"])
    if path == "responses":
        assert answer.json()["tool_choice"] == body["tool_choice"]


async def test_a_forced_call_that_was_cut_is_the_text_that_there_is(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    hermes = renderer_of("hermes")
    generate = ScriptedGenerate(hermes.tokenizer, [CALLED])
    async with client_of(hermes, generate) as client:
        body = {**CHAT, **CHAT_TOOLS, "tool_choice": "required", "max_tokens": 4}
        (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert CALLED.startswith(choice["message"]["content"])
    assert not choice["message"].get("tool_calls")
