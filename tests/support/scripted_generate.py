"""The `Generate` seam, answered from a script: real tokens of written replies, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.generation.completions import head, tail
from tailrace.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnChunk,
    PayloadChunk,
    PayloadRef,
    SamplingParams,
    as_token_ids,
)
from tailrace.rollouts import ChatTokenizer


@dataclass(frozen=True)
class Sampled:
    """One scripted completion: exact tokens, and whether a stop token ends it."""

    token_ids: Sequence[int]
    finish_reason: FinishReason = FinishReason.STOP


@dataclass
class ScriptedGenerate:
    """Replies in order (text, exact tokens, or an error to raise); the last one again when the script is over."""

    tokenizer: ChatTokenizer
    replies: Sequence[str | Sampled | Exception]
    delay: Callable[[], float] = lambda: 0.0
    calls: list[GenerationRequest] = field(default_factory=list)
    chunk_tokens: int | None = None
    """Listeners hear of so many tokens at a time; None: they hear nothing."""
    records_experts: bool = False
    """Completions name a payload: of all positions but the last."""
    streamed: int = 0
    """Tokens that listeners heard of."""

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        reply = self.replies[min(len(self.calls), len(self.replies) - 1)]
        self.calls.append(replace(request, prompt_token_ids=request.prompt_token_ids.copy()))
        await asyncio.sleep(self.delay())
        if isinstance(reply, Exception):
            raise reply
        completion = self._completion(reply, request.sampling)
        if self.records_experts:
            positions = len(request.prompt_token_ids) + completion.num_tokens - 1
            ref = PayloadRef(f"memory:{len(self.calls)}", "uint8", (positions, 1, 1))
            completion = replace(completion, routed_experts=(PayloadChunk(0, positions, ref),))
        if on_chunk is not None and self.chunk_tokens is not None:
            for start in range(0, completion.num_tokens, self.chunk_tokens):
                chunk = tail(head(completion, start + self.chunk_tokens), start)
                self.streamed += chunk.num_tokens
                on_chunk(chunk)
        return completion

    def _completion(self, reply: str | Sampled, sampling: SamplingParams) -> Completion:
        if isinstance(reply, str):
            reply = Sampled(self.tokenizer.encode(reply))
        token_ids, finish_reason = list(reply.token_ids), reply.finish_reason
        if finish_reason is FinishReason.STOP:
            token_ids.append(sampling.stop_token_ids[0])
        if len(token_ids) > sampling.max_tokens:
            token_ids, finish_reason = token_ids[: sampling.max_tokens], FinishReason.LENGTH
        size = len(token_ids)
        return Completion(
            token_ids=as_token_ids(token_ids),
            logprobs=np.linspace(-1, -0.1, size, dtype=np.float32),
            policy_versions=np.zeros(size, np.int32),
            finish_reason=finish_reason,
        )
