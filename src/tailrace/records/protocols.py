"""Seams that cross layers."""

from __future__ import annotations

from typing import Protocol

from tailrace.records.arrays import Int32Array
from tailrace.records.completion import Completion
from tailrace.records.sampling import SamplingParams


class Generate(Protocol):
    """All that a rollout knows of generation.

    Interruption is below: pausing, preempting, moving to another replica and swapping weights only make the `await`
    take longer. Raises `RequestRefused` for an impossible request and `EngineFailed` when no engine can serve it;
    cancelling the awaiting task aborts the request.
    """

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
        """Sample one completion."""
        ...
