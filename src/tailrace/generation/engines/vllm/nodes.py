"""One engine whose workers are on several nodes: the first has the engine, the others hold their workers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Nodes:
    """As one of them knows them."""

    number: int
    count: int
    own_host: str
    """Where this one listens."""
    host: str
    """The first one's, at whose `port` all workers meet."""
    port: int
    folder: Path
    """All of them see it."""

    @property
    def options(self) -> dict[str, str | int]:
        """vLLM's."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": self.count,
            "node_rank": self.number,
            "master_addr": self.host,
            "master_port": self.port,
        }
