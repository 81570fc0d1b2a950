"""What joins the roles of a run: event log, batches, weights, payloads, requests.

A role asks the run's `Transports` for its ends: sockets and folders (`HostTransports`) where roles are processes of
their own, objects (`MemoryTransports`) where all are in this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.router.replica import ReplicaClient
from tailrace.generation.rpc.client import ReportListener
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.lifecycle.roles import Role
from tailrace.transport.batches.queue import BatchReceiver, BatchSender
from tailrace.transport.events.log import EventLog, MemoryEventLog
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.store import PayloadStore
from tailrace.transport.samples.stream import SampleSender
from tailrace.transport.weights.stores import FolderPublisher, ModelStateDictStore

MakeGenerator: TypeAlias = Callable[[PayloadStore], Generator]

BATCHES_AHEAD = 3
"""Capacity of the batch queue: more than the scheduler sends ahead, so that it never waits inside `send`."""


@dataclass(frozen=True, slots=True)
class TrainerEnds:
    """What a rank of the trainer reads, and rank 0 writes."""

    log: EventLog
    batches: BatchReceiver
    model_state_dicts: ModelStateDictStore
    payloads: PayloadStore


class ReplicaConnection(ReplicaClient, Protocol):
    """A connected generator, with what its owner needs beside the router."""

    async def hello(self, epoch: str = "", seed: int | None = None) -> WelcomeReply:
        """Wait for its engine to be built. Raises what building it raised.

        With a `seed` the random streams of requests that bring none begin there.
        """
        ...

    async def close(self) -> None:
        """End the generator in order, for as long as that takes, and this connection."""
        ...

    async def leave(self) -> None:
        """End this connection. Leaving twice does nothing."""
        ...


class Transports(ABC):
    """Makes every role's ends, as one run's settings ask. Use it on a running event loop."""

    @abstractmethod
    def trainer(self, rank: int = 0, address: str = "") -> AbstractAsyncContextManager[TrainerEnds]:
        """The ends of one rank of the trainer, for as long as it runs; `address` is its role's."""

    @abstractmethod
    async def serve_generator(self, role: Role, make_generator: MakeGenerator) -> None:
        """Say that the role is ready, and serve until a client closes the generator. Raises its engine's failure."""

    @abstractmethod
    def batch_sender(self) -> BatchSender:
        """The orchestrator's end of the batch queue."""

    @abstractmethod
    def sample_sender(self) -> SampleSender:
        """The orchestrator's end of the stream of samples to an outside trainer."""

    @abstractmethod
    def model_state_dicts(self) -> FolderPublisher:
        """Where the weights are published that an outside trainer wrote."""

    @abstractmethod
    def payload_accounts(self) -> PayloadAccounts:
        """The orchestrator's end of the payload store."""

    @abstractmethod
    def serve_log(self, log: MemoryEventLog) -> Callable[[], Awaitable[None]]:
        """Let the roles use this log until what is returned is called, which waits for what they have not read."""

    @abstractmethod
    def connect(
        self, address: str, name: str, on_report: ReportListener, payloads: PayloadAccounts | None
    ) -> ReplicaConnection:
        """To a generator that is ready at `address`. `payloads` records what its completions bring."""

    @abstractmethod
    def remove(self) -> None:
        """Remove at once what roles shared. Twice does nothing."""
