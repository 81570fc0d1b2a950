"""Goes on with requests that a generator handed back before they ended, as prompt and prefix, here or elsewhere.

generate() → replica A ... ABORTED, 3 tokens → replica B (prompt, prefix of 3) ... LENGTH, 6 tokens → caller
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tailrace.generation.completions import finished_by
from tailrace.records import Completion, FinishReason, Generate, Int32Array, SamplingParams


class ResumingGenerate:
    """Implements `Generate` over generators that may be interrupted. Whoever awaits it notices nothing.

    Tokens, log-probabilities and versions of every part are kept, and the budget is that of the whole completion:
    `sampling.max_tokens` counts the prefix.
    """

    def __init__(self, choose: Callable[[], Generate]) -> None:
        """`choose` says who goes on, before each part."""
        self._choose = choose

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
        """See `Generate`. Waits for one generator after the other, until the completion has ended by itself."""
        saved = prefix
        while True:
            reason = finished_by(prompt_token_ids, sampling, saved)
            if saved is not None and reason is not None:
                return replace(saved, finish_reason=reason)
            completion = await self._choose()(
                prompt_token_ids,
                sampling=sampling,
                request_id=request_id,
                session_id=session_id,
                group_id=group_id,
                prefix=saved,
            )
            if completion.finish_reason is not FinishReason.ABORTED:
                return completion
            saved = completion
