"""A policy without a run: answers of a schema are its alone, where its engine guides decoding."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

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
async def client_of(renderer: ChatRenderer, generate: Generate) -> AsyncIterator[httpx.AsyncClient]:
    def new_policy(sampling: SamplingParams) -> RolloutPolicy:
        task = Task(TaskId("http/0"), "http", 0, {})
        rollout = Rollout(RolloutId("http#0"), GroupId("http#0"), task, sampling)
        return RolloutPolicy(rollout, renderer=renderer, generate=generate, max_turns=1)

    async with Gateway() as gateway:
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


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "with tools is not supported"),
        ({"response_format": {"type": "grammar"}}, "may be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "any"}}}, "must be an object"),
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
