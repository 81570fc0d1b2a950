"""A teacher on a local port: some way of its own to find tokens likely, and a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from tailrace.records import Json
from tests.support.judge_endpoint import Answer

PATHS = ("/v1/completions", "/tokenize")
UNLIKELY = -1e4


def likelihood(token: int) -> float:
    """The teacher's log-probability of a token, wherever it stands."""
    return -0.1 if token % 2 else -4.0 - token / 1024


def likeliest(top_k: int) -> dict[int, float]:
    """The tokens 1, 3, 5, ... with three quarters of what is left each."""
    return {2 * number + 1: math.log(0.75 * 0.25**number) for number in range(top_k)}


def prompt_logprobs(token_ids: list[int], top_k: int = 0, text: str = "x") -> Answer:
    """As vLLM answers `/v1/completions` with `prompt_logprobs`: the token's own entry first, then the likeliest."""
    likely = likeliest(top_k)

    def entries(token: int) -> dict[str, Json]:
        told = {token: likely.get(token, UNLIKELY) if top_k else likelihood(token), **likely}
        return {str(one): {"logprob": logprob, "rank": 1, "decoded_token": text} for one, logprob in told.items()}

    told = [None, *(entries(token) for token in token_ids[1:])]
    return Answer(body=json.dumps({"choices": [{"text": text, "prompt_logprobs": told}]}).encode())


def teacher(
    encode: Callable[[str], list[int]], *, max_model_len: int = 4096, top_k: int = 0
) -> Callable[[Json], Answer]:
    """What it answers to both questions."""

    def answer(request: Json) -> Answer:
        if isinstance(request["prompt"], list):
            assert (request["max_tokens"], request["prompt_logprobs"]) == (1, top_k)
            return prompt_logprobs(request["prompt"], top_k)
        tokens = encode(request["prompt"])
        told = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        return Answer(body=json.dumps(told).encode())

    return answer
