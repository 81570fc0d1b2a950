"""`Generate`, with every completion told to whoever counts."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.records import Completion, Generate, Int32Array, SamplingParams


class RecordedGenerate:
    """Calls `generate`, then `on_completion`."""

    def __init__(self, generate: Generate, on_completion: Callable[[str, Completion], None]) -> None:
        """`on_completion` is given the session's id too."""
        self._generate = generate
        self._on_completion = on_completion

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
        """See `Generate`."""
        completion = await self._generate(
            prompt_token_ids,
            sampling=sampling,
            request_id=request_id,
            session_id=session_id,
            group_id=group_id,
            prefix=prefix,
        )
        self._on_completion(session_id, completion)
        return completion
