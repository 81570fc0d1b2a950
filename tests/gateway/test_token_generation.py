from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from renderers.base import create_renderer
from renderers.client import generate
from renderers.configs import AutoRendererConfig

from tailrace.records import FinishReason
from tailrace.rollouts import ChatRenderer
from tests.support.scripted_generate import Sampled
from tests.support.served_policies import Served, served, user


async def post(talk: Served, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client:
        return await client.post("/inference/v1/generate", json=body)


async def test_the_client_of_renderers_gets_the_tokens_that_were_sampled(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    renderer = renderer_of("qwen3")
    theirs = create_renderer(renderer.tokenizer, AutoRendererConfig())
    async with (
        served(renderer, ["Ada", "Bob"], max_model_tokens=4000) as talk,
        openai.AsyncOpenAI(base_url=talk.endpoint.openai_url, api_key=talk.endpoint.key) as client,
    ):
        first = await generate(client=client, renderer=theirs, messages=[user("who?")], model="policy")  # type: ignore[list-item]
        following = renderer.tokenizer.encode("\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
        prompt = [*first["prompt_ids"], *first["completion_ids"], *following]
        second = await generate(
            client=client, renderer=theirs, messages=[], prompt_ids=prompt, model="policy", sampling_params={"seed": 3}
        )
    (branch,) = talk.rollout.branches
    assert [first["content"], second["content"]] == ["Ada", "Bob"]
    assert branch.token_ids.tolist() == [*prompt, *second["completion_ids"]]
    for answer, (start, end) in zip([first, second], branch.completion_spans, strict=True):
        assert branch.token_ids[start:end].tolist() == answer["completion_ids"]
        assert branch.logprobs[start:end].tolist() == pytest.approx(answer["completion_logprobs"])
    talk.assert_recorded_as_sampled()


async def test_a_prompt_that_leaves_the_branch_starts_another_with_what_they_share(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob", "Cleo"]) as talk:
        answers = []
        prompt = [5, 6, 7]
        for _ in range(2):
            answers.append((await post(talk, {"token_ids": prompt})).json()["choices"][0]["token_ids"])
            prompt = [*prompt, *answers[-1], 8]
        forked = [5, 6, 7, *answers[0], 9]
        other = (await post(talk, {"token_ids": forked})).json()["choices"][0]["token_ids"]
    first, second = talk.rollout.branches
    assert first.token_ids.tolist() == [5, 6, 7, *answers[0], 8, *answers[1]]
    assert second.token_ids.tolist() == [*forked, *other]
    assert len(second.completion_spans) == 1
    talk.assert_recorded_as_sampled()


async def test_versions_and_the_end_of_a_completion_are_told(renderer: ChatRenderer) -> None:
    reply = Sampled([11, 12, 13], FinishReason.LENGTH)
    async with served(renderer, [reply]) as talk:
        body = {"request_id": "mine", "token_ids": [5], "sampling_params": {"max_tokens": 3, "stop_token_ids": [99]}}
        answer = (await post(talk, body)).json()
    choice = answer["choices"][0]
    assert (answer["request_id"], choice["finish_reason"]) == ("mine", "length")
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert talk.generate.scripted.calls[0].sampling.stop_token_ids == (99,)
    assert np.array_equal(talk.generate.scripted.calls[0].prompt_token_ids, [5])


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("stop", [[], ["Bob"]])
async def test_tokens_are_streamed_once_each_as_they_are_sampled(renderer: ChatRenderer, stop: list[str]) -> None:
    body = {
        "request_id": "mine",
        "token_ids": [5, 6],
        "sampling_params": {"stop": stop},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        served(renderer, ["Ada and Bob and Cleo"], stepwise=True, settings={"keep_alive_s": 0.05}) as talk,
        httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client,
    ):
        talk.generate.allow(1)
        async with client.stream("POST", "/inference/v1/generate", json=body) as response:
            events = events_of(response)
            parts = [] if stop else [await anext(events)]
            assert not talk.generate.completions
            talk.generate.allow(64)
            *rest, last, usage, done = [event async for event in events]
    choices = [part["choices"][0] for part in [*parts, *rest, last]]
    (branch,) = talk.rollout.branches
    ((start, end),) = branch.completion_spans
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == branch.token_ids[start:end].tolist()
    told = [one for choice in choices for one in choice["logprobs"]["content"]]
    assert [one["logprob"] for one in told] == pytest.approx(branch.logprobs[start:end].tolist())
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": end - start}]
    assert usage["usage"]["completion_tokens"] == end - start
    assert {part["request_id"] for part in [*parts, *rest, last, usage]} == {"mine"}
    assert done == "data: [DONE]"


async def test_a_stream_of_tokens_whose_rollout_ends_says_so(renderer: ChatRenderer) -> None:
    async with (
        served(renderer, ["Ada and Bob"], stepwise=True) as talk,
        httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client,
    ):
        talk.generate.allow(1)
        async with client.stream("POST", "/inference/v1/generate", json={"token_ids": [5], "stream": True}) as response:
            events = events_of(response)
            await anext(events)
            talk.policy.close()
            failed, done = [event async for event in events]
    assert (failed["error"]["code"], done) == (410, "data: [DONE]")


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [2**40]}, "token_ids"),
        ({"token_ids": "many"}, "token_ids"),
        ({"token_ids": [1], "stream": "yes"}, "stream"),
        (
            {"token_ids": [1], "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "n"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0.5}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"structured_outputs": {"json": {}}}}, "structured_outputs"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    renderer: ChatRenderer, body: dict[str, Any], parameter: str
) -> None:
    async with served(renderer) as talk:
        answer = await post(talk, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
    assert talk.rollout.turns == 0


async def test_models_health_and_metrics_are_there(renderer: ChatRenderer) -> None:
    async with served(renderer, max_model_tokens=4000) as talk:
        await post(talk, {"token_ids": [5]})
        async with httpx.AsyncClient(base_url=talk.endpoint.root_url) as client:
            models = (await client.get("/v1/models", headers=talk.headers)).json()["data"]
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/health")).status_code == 200
            metrics = (await client.get("/metrics")).text
    assert [(model["id"], model["max_model_len"]) for model in models] == [("policy", 4000)]
    assert 'tailrace_gateway_requests_total{route="generate",status="200"} 1' in metrics
    assert "\ntailrace_gateway_rollouts_open 1\n" in metrics
