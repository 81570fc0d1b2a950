"""The state of one call of `generate`, over all the replicas that serve parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrace.errors import EngineFailed, RequestRefused
from tailrace.generation.completions import joined
from tailrace.generation.router.replica import ReplicaClient
from tailrace.records import Completion, FinishReason, GenerationRequest, RequestId


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """Plain state; the router does the I/O."""

    request: GenerationRequest
    """As it came, but with everything that was sampled before the present part as its prefix."""
    is_interrupted: bool = False
    """It returns to its caller as it is."""
    client: ReplicaClient | None = None
    """Where its present part runs."""
    _parts: int = 0
    _died: int = 0

    @property
    def part(self) -> GenerationRequest:
        """What the present replica is asked. Parts have names of their own: a replica may meet a request twice."""
        if not self._parts:
            return self.request
        return replace(self.request, request_id=RequestId(f"{self.request.request_id}+{self._parts}"))

    def continue_from(self, completion: Completion) -> None:
        """A replica handed it back before its end."""
        self.request = replace(self.request, prefix=completion)
        self._parts += 1

    def fail_over(self, chunks: Sequence[Completion], error: EngineFailed, most: int) -> None:
        """Its replica died; `chunks` had come by then. Raises `RequestRefused` after more than `most` deaths."""
        self._died += 1
        if self._died > most:
            raise RequestRefused(
                f"request {self.request.request_id} was running on {self._died} generators as they failed; it is not "
                "tried on another (generator.router.max_failovers)"
            ) from error
        if chunks:
            self.request = replace(self.request, prefix=joined(self.request.prefix, chunks, FinishReason.ABORTED))
        self._parts += 1

    def as_aborted(self) -> Completion:
        """What it has so far, for its caller."""
        if self.request.prefix is None:
            return joined(None, [], FinishReason.ABORTED)
        return replace(self.request.prefix, finish_reason=FinishReason.ABORTED)
