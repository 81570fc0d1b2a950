"""A teacher on a local port: some way of its own to find tokens likely, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable

from tailrace.records import Json
from tests.support.judge_endpoint import Answer

PATHS = ("/v1/completions", "/tokenize")


def likelihood(token: int) -> float:
    """The teacher's log-probability of a token, wherever it stands."""
    return -0.1 if token % 2 else -4.0 - token / 1024


def prompt_logprobs(token_ids: list[int]) -> Answer:
    """As vLLM answers `/v1/completions` with `prompt_logprobs`."""
    told = [{str(token): {"logprob": likelihood(token), "rank": 1, "decoded_token": "x"}} for token in token_ids[1:]]
    return Answer(body=json.dumps({"choices": [{"text": "x", "prompt_logprobs": [None, *told]}]}).encode())


def teacher(encode: Callable[[str], list[int]], *, max_model_len: int = 4096) -> Callable[[Json], Answer]:
    """What it answers to both questions."""

    def answer(request: Json) -> Answer:
        if isinstance(request["prompt"], list):
            assert (request["max_tokens"], request["prompt_logprobs"]) == (1, 0)
            return prompt_logprobs(request["prompt"])
        tokens = encode(request["prompt"])
        told = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        return Answer(body=json.dumps(told).encode())

    return answer
