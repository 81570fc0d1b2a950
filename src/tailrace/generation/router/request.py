"""One call of `generate`, over all the replicas that it meets: what it has so far, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrace.errors import EngineFailed, RequestRefused
from tailrace.generation.completions import assembled, finished_by
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.router.replica import ReplicaClient
from tailrace.records import Completion, FinishReason, Int32Array, SamplingParams


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """Plain state; the router asks and waits."""

    prompt_token_ids: Int32Array
    sampling: SamplingParams
    request_id: str
    session_id: str
    group_id: str
    prefix: Completion | None
    """Everything that was sampled before the present part."""
    is_interrupted: bool = False
    """Its caller is to have it back as it is."""
    client: ReplicaClient | None = None
    """Where its present part runs."""
    _parts: int = 0
    _died: int = 0

    @property
    def part_id(self) -> str:
        """Of the present part: a replica may meet the same request twice."""
        return f"{self.request_id}+{self._parts}" if self._parts else self.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why nothing is left to sample; None where something is."""
        return finished_by(self.prompt_token_ids, self.sampling, self.prefix)

    def goes_on(self, completion: Completion) -> None:
        """A replica handed it back before its end."""
        self.prefix = completion
        self._parts += 1

    def lost(self, chunks: Sequence[SampledTokens], error: EngineFailed, most: int) -> None:
        """Its replica died; `chunks` had come by then. Raises `RequestRefused` after more than `most` deaths."""
        self._died += 1
        if self._died > most:
            raise RequestRefused(
                f"request {self.request_id} was running on {self._died} generators as they failed; it is not tried on "
                "another (generator.router.max_failovers)"
            ) from error
        self.prefix = self.with_chunks(chunks)
        self._parts += 1

    def with_chunks(self, chunks: Sequence[SampledTokens]) -> Completion | None:
        """What there is of it once these have come as well."""
        return assembled(self.prefix, chunks, FinishReason.ABORTED) if chunks else self.prefix

    def interrupted(self) -> Completion:
        """As it is, for its caller."""
        if self.prefix is None:
            return assembled(None, [], FinishReason.ABORTED)
        return replace(self.prefix, finish_reason=FinishReason.ABORTED)
