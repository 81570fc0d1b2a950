"""vLLM's tokens in, tokens out: `POST /inference/v1/generate`.

    {"token_ids": [...], "sampling_params": {...}} ─► {"choices": [{"token_ids", "logprobs", "weight_versions"}]}
                             "stream": true        ─► the same in parts, versions and the finish reason with the last

As of vLLM 0.32; each log-probability names its token both ways that its clients read (`token_id` and `token`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.gateway.dialects.fields import (
    LEAVE_IT_OUT,
    UNMODIFIED,
    Neutral,
    number,
    of_type,
    optional,
    require_known,
    stop_strings,
    streams_usage,
    vllm_top_k,
)
from tailrace.gateway.dialects.protocol import Answer, Dialect, Failure, RequestInvalid, Stream
from tailrace.gateway.dialects.token_events import TokenEvents
from tailrace.gateway.dialects.token_output import ended, tokens
from tailrace.gateway.dialects.usage import usage
from tailrace.records import Int32Array, Json

_READ = frozenset({"request_id", "token_ids", "sampling_params", "model", "stream", "stream_options"})
_WITHOUT_EFFECT = frozenset({"cache_salt", "token_offsets", "reasoning_ended", "reasoning_parser_kwargs"})
_NEUTRAL: Neutral = {
    "priority": ((0,), "the run's scheduler orders requests"),
    "output_mode": (("tokens",), "tokens come as ids alone"),
    "return_token_ids": ((False,), LEAVE_IT_OUT),
    "features": ((), "the policy reads text only"),
    "content_parts": (([],), "the policy reads text only"),
    "kv_transfer_params": ((), LEAVE_IT_OUT),
    "ec_transfer_params": ((), LEAVE_IT_OUT),
}
_SAMPLING_READ = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"})
_SAMPLING_WITHOUT_EFFECT = frozenset(
    {
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
        *("include_stop_str_in_output", "return_token_ids", "routed_experts_prompt_start"),
    }
)
_SAMPLING_NEUTRAL: Neutral = {
    "n": ((1,), "a request is one turn; ask again for another one"),
    "best_of": ((1,), LEAVE_IT_OUT),
    "logprobs": ((0, 1), "engines tell the log-probability of the sampled token alone"),
    "prompt_logprobs": ((), LEAVE_IT_OUT),
    "min_p": ((0,), UNMODIFIED),
    "min_tokens": ((0,), UNMODIFIED),
    "presence_penalty": ((0,), UNMODIFIED),
    "frequency_penalty": ((0,), UNMODIFIED),
    "repetition_penalty": ((1,), UNMODIFIED),
    "ignore_eos": ((False,), LEAVE_IT_OUT),
    "bad_words": (([],), LEAVE_IT_OUT),
    "logit_bias": (({},), UNMODIFIED),
    "allowed_token_ids": ((), LEAVE_IT_OUT),
    "structured_outputs": ((), "answers of a schema are chat's"),
    "guided_decoding": ((), LEAVE_IT_OUT),
    "truncate_prompt_tokens": ((), LEAVE_IT_OUT),
    "extra_args": (({},), LEAVE_IT_OUT),
}


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to follow these tokens."""

    request_id: str | None
    token_ids: Int32Array  # [num_tokens]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...] | None
    """None: the model's own."""
    streams: bool
    streams_usage: bool
    """Whether a last event tells the usage."""


class TokenGeneration(Dialect[TokenRequest]):
    """Reads and writes vLLM's form."""

    name = "generate"

    @override
    def read(self, body: Mapping[str, Json]) -> TokenRequest:
        require_known(body, read=_READ, neutral=_NEUTRAL, without_effect=_WITHOUT_EFFECT)
        sampling = of_type(body.get("sampling_params") or {}, dict, "sampling_params")
        require_known(sampling, read=_SAMPLING_READ, neutral=_SAMPLING_NEUTRAL, without_effect=_SAMPLING_WITHOUT_EFFECT)
        ends = sampling.get("stop_token_ids")
        return TokenRequest(
            request_id=optional(body, "request_id", str),
            token_ids=_token_ids(body.get("token_ids"), "token_ids"),
            max_tokens=optional(sampling, "max_tokens", int),
            temperature=number(sampling, "temperature"),
            top_p=number(sampling, "top_p"),
            top_k=vllm_top_k(sampling),
            seed=optional(sampling, "seed", int),
            stop=stop_strings(sampling.get("stop"), "stop"),
            stop_token_ids=tuple(_token_ids(ends, "stop_token_ids").tolist()) if ends else None,
            streams=optional(body, "stream", bool) or False,
            streams_usage=streams_usage(body),
        )

    @override
    def whole(self, request: TokenRequest, answer: Answer) -> dict[str, Json]:
        completion = answer.reply.completion
        choice = {**tokens(completion), **ended(completion), "routed_experts": None}
        return {"request_id": request.request_id or answer.answer_id, "choices": [choice], "usage": usage(answer)}

    @override
    def events(self, request: TokenRequest, answer_id: str, created_s: int) -> Stream:
        return TokenEvents(request.request_id or answer_id, self.error, tells_usage=request.streams_usage)

    @override
    def error(self, failure: Failure) -> dict[str, Json]:
        """As vLLM writes it."""
        return {
            "error": {
                "message": failure.message,
                "type": "BadRequestError" if failure.status < 500 else "InternalServerError",
                "param": failure.parameter,
                "code": failure.status,
            }
        }


def _token_ids(value: Json, name: str) -> Int32Array:
    try:
        token_ids = msgspec.convert(value, list[int])
    except msgspec.ValidationError:
        raise RequestInvalid(f"{name} must be a list of token ids", parameter=name) from None
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= 2**31:
        raise RequestInvalid(f"{name} must be ids from 0 on, one at least", parameter=name)
    return np.array(token_ids, np.int32)
