"""What a request must be to be accepted."""

from __future__ import annotations

import numpy as np

from tailrace.errors import RequestRefused, SettingsError
from tailrace.generation.engines.protocol import EngineLimits
from tailrace.records import GenerationRequest, Int32Array


def context_of(request: GenerationRequest) -> Int32Array:
    """Every token that is known before sampling starts: the prompt, and the prefix where there is one."""
    if request.prefix is None:
        return request.prompt_token_ids
    return np.concatenate([request.prompt_token_ids, request.prefix.token_ids])


def require_acceptable(request: GenerationRequest, limits: EngineLimits) -> None:
    """Raise `RequestRefused`, naming the request, for one that no engine with these limits can serve."""
    name = f"request {request.request_id}"
    try:
        request.sampling.require_valid()
    except SettingsError as error:
        raise RequestRefused(f"{name}: {error}") from error
    if len(request.prompt_token_ids) == 0:
        raise RequestRefused(f"{name} has an empty prompt; it must hold one token at least")
    sampled = 0 if request.prefix is None else request.prefix.num_tokens
    context = context_of(request)
    if len(context) + 1 > limits.max_model_tokens:
        raise RequestRefused(
            f"{name} has {len(context)} tokens before the first new one; the model's context holds "
            f"{limits.max_model_tokens}, one of which must be left (model.max_model_tokens)"
        )
    if sampled >= request.sampling.max_tokens:
        raise RequestRefused(
            f"{name} has sampled {sampled} of sampling.max_tokens = {request.sampling.max_tokens} already"
        )
    if context.min() < 0 or context.max() >= limits.vocab_size:
        stranger = int(context[(context < 0) | (context >= limits.vocab_size)][0])
        raise RequestRefused(f"{name} holds token id {stranger}; the vocabulary's are 0 to {limits.vocab_size - 1}")
