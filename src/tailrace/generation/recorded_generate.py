"""`Generate`, with callbacks for every completion and every cancelled request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from typing_extensions import override

from tailrace.records import Completion, Generate, GenerationRequest, OnChunk


class RecordedGenerate(Generate):
    """Calls `generate`, then `on_completion`, or `on_request_cancelled` where the caller is cancelled before."""

    def __init__(
        self,
        generate: Generate,
        on_completion: Callable[[Completion], None],
        on_request_cancelled: Callable[[GenerationRequest, int], None],
    ) -> None:
        """`on_request_cancelled` is given the request and how many tokens its chunks had brought by then."""
        self._generate, self._on_completion = generate, on_completion
        self._on_request_cancelled = on_request_cancelled

    @override
    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        sampled = request.prefix_tokens

        def count(chunk: Completion) -> None:
            nonlocal sampled
            sampled += chunk.num_tokens
            if on_chunk is not None:
                on_chunk(chunk)

        try:
            completion = await self._generate(request, count)
        except asyncio.CancelledError:
            self._on_request_cancelled(request, sampled)
            raise
        self._on_completion(completion)
        return completion
