"""The policy's own engine as a judge: the same weights, queue and caches as its rollouts, no other server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from typing_extensions import override

from tailrace.errors import ChatFailed, EnvironmentFailed, RequestRefused
from tailrace.generation.settings import CONTEXT_IS
from tailrace.records import (
    FinishReason,
    Generate,
    GenerationRequest,
    GroupId,
    Message,
    RequestId,
    SamplingParams,
    SessionId,
)
from tailrace.rollouts.chat.rendering import Renderer
from tailrace.rollouts.scoring.judge.chat import Chat, ChatAnswer


class EngineChat(Chat):
    """Answers come through `generate`. What it samples has no owner and is never trained on."""

    _numbers = count()

    def __init__(
        self, renderer: Renderer, generate: Generate, *, max_model_tokens: int | None = None, name: str = "judge"
    ) -> None:
        """`name` tells its requests from those of judges in other processes."""
        self._name = name
        self._renderer = renderer
        self._generate = generate
        self._max_model_tokens = max_model_tokens

    @override
    async def __call__(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> ChatAnswer:
        name = f"{self._name}/{next(self._numbers)}"
        try:
            prompt = self._renderer.render(messages)
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=self._limit(len(prompt), max_tokens),
                stop_token_ids=self._renderer.stop_token_ids,
            )
            completion = await self._generate(
                GenerationRequest(
                    request_id=RequestId(name),
                    session_id=SessionId(name),
                    group_id=GroupId(name),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                )
            )
        except (RequestRefused, EnvironmentFailed) as error:
            raise ChatFailed(f"the policy's engine cannot take it: {error}", may_recover=False) from error
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
            raise ChatFailed(f"the policy's engine ended it as {completion.finish_reason}", may_recover=True)
        parsed = self._renderer.parse(completion, prompt_token_ids=prompt)
        return ChatAnswer(parsed.message()["content"], len(prompt), completion.num_tokens)

    @override
    async def close(self) -> None:
        pass  # the engine belongs to the run

    def _limit(self, prompt_tokens: int, max_tokens: int) -> int:
        if self._max_model_tokens is None:
            return max_tokens
        room = self._max_model_tokens - prompt_tokens
        if room < 1:
            raise RequestRefused(
                f"a prompt of {prompt_tokens} tokens leaves no room in the context of {self._max_model_tokens} "
                f"({CONTEXT_IS})"
            )
        return min(max_tokens, room)
