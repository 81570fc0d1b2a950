"""`Generate`, with callbacks for every request that ended and every one that was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from tailrace.generation.completions import joined
from tailrace.records import Completion, FinishReason, Generate, GenerationRequest, OnChunk

_HEARD = ("mixed_cache_tokens", "nonfinite_logprobs")
"""What chunks tell of a completion's metrics: times and the rest come with an engine's last one."""


class RecordedGenerate(Generate):
    """Calls `generate`, then `on_completion`, or `on_request_cancelled` where the caller is cancelled before.

    A request that its listener ends (a stop string is there) is a completion of what was heard of it.
    """

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
        chunks, has_enough = list[Completion](), False

        def hear(chunk: Completion) -> None:
            nonlocal has_enough
            chunks.append(chunk)
            if on_chunk is not None:
                has_enough = True
                on_chunk(chunk)
                has_enough = False

        try:
            completion = await self._generate(request, hear)
        except asyncio.CancelledError:
            self._on_request_cancelled(request, request.prefix_tokens + sum(chunk.num_tokens for chunk in chunks))
            raise
        except Exception:
            if has_enough:
                self._on_completion(_heard(request, chunks))
            raise
        self._on_completion(completion)
        return completion


def _heard(request: GenerationRequest, chunks: list[Completion]) -> Completion:
    heard = joined(request.prefix, chunks, FinishReason.STOP)
    return replace(heard, metrics={name: heard.metrics[name] for name in _HEARD})
