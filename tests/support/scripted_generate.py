"""The `Generate` seam, answered from a script: real tokens of written replies, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.records import Completion, FinishReason, Int32Array, SamplingParams, as_token_ids
from tailrace.rollouts import ChatTokenizer


@dataclass(frozen=True)
class Sampled:
    """One scripted completion: exact tokens, and whether a stop token ends it."""

    token_ids: Sequence[int]
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True)
class Call:
    """One call as the engine saw it."""

    prompt_token_ids: Int32Array
    sampling: SamplingParams
    request_id: str
    session_id: str


@dataclass
class ScriptedGenerate:
    """Replies in order (text, exact tokens, or an error to raise); the last one again when the script is over."""

    tokenizer: ChatTokenizer
    replies: Sequence[str | Sampled | Exception]
    delay: Callable[[], float] = lambda: 0.0
    calls: list[Call] = field(default_factory=list)

    async def __call__(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
    ) -> Completion:
        reply = self.replies[min(len(self.calls), len(self.replies) - 1)]
        self.calls.append(Call(prompt_token_ids.copy(), sampling, request_id, session_id))
        await asyncio.sleep(self.delay())
        if isinstance(reply, Exception):
            raise reply
        return self._completion(reply, sampling)

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
