"""A teacher on an engine of the run itself: no other server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count

import numpy as np
from typing_extensions import override

from tailrace.errors import ChatFailed, RequestRefused
from tailrace.records import (
    NO_TOKEN,
    FinishReason,
    Generate,
    GenerationRequest,
    GroupId,
    Int32Array,
    RequestId,
    SamplingParams,
    SessionId,
    TokenScores,
)
from tailrace.rollouts.scoring.teacher.teacher import TokenScorer


class EngineScorer(TokenScorer):
    """Scores come through `generate` of an engine that holds the teacher, and never gets other weights."""

    _numbers = count()

    def __init__(
        self, generate: Generate, serving: Callable[[], Awaitable[None]], *, vocabulary: int, top_k: int = 0
    ) -> None:
        """`serving` waits for the engine; `vocabulary` is the policy's, whose tokens alone are named."""
        self._generate, self._serving = generate, serving
        self._vocabulary, self._top_k = vocabulary, top_k

    @override
    async def ready(self) -> None:
        await self._serving()

    @override
    async def score(self, token_ids: Int32Array) -> TokenScores:
        name = f"teacher/{next(self._numbers)}"
        request = GenerationRequest(
            request_id=RequestId(name),
            session_id=SessionId(name),
            group_id=GroupId(name),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(temperature=1.0, max_tokens=1),
            score_top_k=self._top_k,
        )
        try:
            completion = await self._generate(request)
        except RequestRefused as error:
            raise ChatFailed(f"the teacher's engine cannot take it: {error}", may_recover=False) from error
        scores = completion.scores
        if scores is None or completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
            raise ChatFailed(f"the teacher's engine ended it as {completion.finish_reason}", may_recover=True)
        if not (np.isfinite(scores.logprobs).all() and np.isfinite(scores.top_logprobs).all()):
            raise ChatFailed("the teacher's engine came to log-probabilities that are not finite", may_recover=False)
        strange = scores.top_ids >= self._vocabulary
        top_ids = np.where(strange, np.int32(NO_TOKEN), scores.top_ids)
        return TokenScores(scores.logprobs, top_ids, np.where(strange, np.float32(0), scores.top_logprobs))

    @override
    async def close(self) -> None:
        pass  # the engine belongs to the run
