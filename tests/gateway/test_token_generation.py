from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [2**40]}, "token_ids"),
        ({"token_ids": "many"}, "token_ids"),
        ({"token_ids": [1], "stream": True}, "stream"),
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
