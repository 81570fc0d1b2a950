"""One replica, as the router knows it: what it reported, what it was sent since, and which version it holds."""

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


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """A replica, for metrics and people."""

    name: str
    serving: bool
    """Whether it takes requests."""
    requests: int
    """In flight."""
    running_tokens: int
    """Of those, by its last report."""
    policy_version: int
    restarts: int
    failovers: int
    """Requests that went on elsewhere because this replica died or got stuck."""

    def metrics(self) -> dict[str, float]:
        """By the names of the metrics' table."""
        values = {
            "requests": self.requests,
            "running_tokens": self.running_tokens,
            "policy_version": self.policy_version,
            "serving": self.serving,
            "restarts": self.restarts,
            "failovers": self.failovers,
        }
        return {f"generator/{self.name}/{name}": float(value) for name, value in values.items()}


@dataclass(slots=True, eq=False)
class Replica:
    """State of one replica over all its restarts. Plain: whoever changes it tells the router's waiters."""

    name: str
    client: ReplicaClient | None = None
    """None while it is not there."""
    version: int = -1
    """Of its weights; -1 until it was given the trainer's, whatever model it started with."""
    starved: bool = False
    """It trails the trainer by more than it may: no new requests."""
    statistics: EngineStatistics | None = None
    requests: int = 0
    restarts: int = 0
    failovers: int = 0
    completions: int = 0
    _sent: int = 0
    _promised: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and tokens of each request that no report covers yet."""
    _promised_tokens: int = 0

    @property
    def load(self) -> float:
        """For the routing policy."""
        if self.client is None or self.client.failure is not None or self.starved or self.statistics is None:
            return UNAVAILABLE
        return load_of(self.statistics, self._promised_tokens)

    def joined(self, client: ReplicaClient, statistics: EngineStatistics) -> None:
        """A fresh process, or a fresh connection."""
        self.client, self.statistics, self.version = client, statistics, -1
        self.starved, self._sent, self._promised_tokens, self.completions = False, 0, 0, 0
        self._promised.clear()

    def sent(self, tokens: int) -> None:
        """A request that may come to hold so many tokens is on its way."""
        self._sent += 1
        self._promised.append((self._sent, tokens))
        self._promised_tokens += tokens

    def reported(self, statistics: EngineStatistics, received: int) -> None:
        """How busy it is; `received` of our requests had arrived, and are part of that."""
        self.statistics = statistics
        while self._promised and self._promised[0][0] <= received:
            self._promised_tokens -= self._promised.popleft()[1]

    def figures(self) -> ReplicaFigures:
        """A snapshot."""
        return ReplicaFigures(
            name=self.name,
            serving=self.load != UNAVAILABLE,
            requests=self.requests,
            running_tokens=self.statistics.running_tokens if self.client and self.statistics else 0,
            policy_version=max(0, self.version),
            restarts=self.restarts,
            failovers=self.failovers,
        )
