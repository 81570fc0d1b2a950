"""One replica as the router sees it: its last report, the requests sent since, the version it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.router.policies import UNAVAILABLE, load_of
from tailrace.records import Completion, GenerationRequest, ModelStateDictRef, OnChunk


class ReplicaClient(Protocol):
    """What the router asks of a connected generator: `GeneratorClient`."""

    @property
    def failure(self) -> Exception | None:
        """Why every call fails, once that is so."""

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Sample one completion. See `records.Generate`."""

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        """Install weights; the version installed."""

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        """Hand requests back as `ABORTED` completions; how many there were."""

    async def failed(self) -> Exception:
        """Wait until it is of no use any more; why."""

    def fail(self, failure: Exception) -> None:
        """Fail every outstanding and every later call."""


@dataclass(slots=True, eq=False)
class Replica:
    """State of one replica over all its restarts. Plain; the router that changes it wakes its own waiters."""

    name: str
    client: ReplicaClient | None = None
    """None while it is not there."""
    version: int = -1
    """Of its weights; -1 until it was given the trainer's, whatever model it started with."""
    starved: bool = False
    """Its weights are older than what may serve: no new requests."""
    is_admitted: bool = True
    """It held weights that are near the trainer's since it joined: no version is installed that it does not hold."""
    leaves_for: str = ""
    """Why it leaves in order: no new requests, and those it has go on elsewhere. Empty while it stays."""
    was_there: bool = False
    """At least once in this run."""
    statistics: EngineStatistics | None = None
    requests: int = 0
    """In flight."""
    restarts: int = 0
    failovers: int = 0
    """Requests that went on elsewhere because this replica died or got stuck."""
    _sent: int = 0
    _promised: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and tokens of each request that no report covers yet."""
    _promised_tokens: int = 0

    @property
    def load(self) -> float:
        """For the routing policy."""
        if self.client is None or self.client.failure is not None or self.statistics is None:
            return UNAVAILABLE
        if self.starved or self.leaves_for:
            return UNAVAILABLE
        return load_of(self.statistics, self._promised_tokens)

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.load != UNAVAILABLE

    def join(self, client: ReplicaClient, statistics: EngineStatistics) -> None:
        """A fresh process, or a fresh connection."""
        self.client, self.statistics, self.version = client, statistics, -1
        self.starved, self.leaves_for, self._sent, self._promised_tokens = False, "", 0, 0
        self.was_there = True
        self._promised.clear()

    def promise(self, tokens: int) -> None:
        """A request that may come to hold so many tokens was sent."""
        self._sent += 1
        self._promised.append((self._sent, tokens))
        self._promised_tokens += tokens

    def report(self, statistics: EngineStatistics, received: int) -> None:
        """Take its report, which covers the first `received` of our requests."""
        self.statistics = statistics
        while self._promised and self._promised[0][0] <= received:
            self._promised_tokens -= self._promised.popleft()[1]

    def metrics(self) -> dict[str, float]:
        """By the names of the metrics' table."""
        values = {
            "requests": self.requests,
            "running_tokens": self.statistics.running_tokens if self.client and self.statistics else 0,
            "policy_version": max(0, self.version),
            "serving": self.serving,
            "restarts": self.restarts,
            "failovers": self.failovers,
        }
        return {f"generator/{self.name}/{name}": float(value) for name, value in values.items()}
