"""Transports within one process: objects instead of sockets, without deadlines that a debugger would break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import NoReturn

from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import EngineFailed
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc.client import ReportListener
from tailrace.generation.rpc.messages import PROTOCOL, WelcomeReply
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.roles import Role
from tailrace.models.identity import ModelIdentity
from tailrace.records import Completion, GenerationRequest, ModelStateDictRef, OnChunk
from tailrace.run.transports import BATCHES_AHEAD, MakeGenerator, ReplicaConnection, TrainerEnds, Transports
from tailrace.transport.batches.queue import MemoryBatchQueue
from tailrace.transport.channels import wait_until
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.store import MemoryPayloadStore
from tailrace.transport.weights.stores import MemoryModelStateDictStore

_of_this_process: dict[str, MemoryTransports] = {}
"""By epoch."""


class MemoryTransports(Transports):
    """Of roles of this process. They end with the run."""

    def __init__(self, log: MemoryEventLog, model: str) -> None:
        """`model` is the name of the one that generators start with."""
        self._log, self.model = log, model
        self._batches = MemoryBatchQueue(BATCHES_AHEAD)
        self.store = MemoryModelStateDictStore()
        self._payloads = MemoryPayloadStore()
        self.generators: dict[str, tuple[Generator, asyncio.Event]] = {}
        """By address: one that serves, and what asks it to end."""
        self._building, self._changed = asyncio.Lock(), asyncio.Event()
        self._has_built, self._unbuilt = False, set[str]()

    @override
    @asynccontextmanager
    async def trainer(self, rank: int = 0, address: str = "") -> AsyncIterator[TrainerEnds]:
        # Two threads that import transformers at once find it half imported, and two that load models break it.
        await wait_until(self._changed, lambda: self._has_built and not self._unbuilt)
        yield TrainerEnds(self._log, self._batches.receiver(rank), self.store, self._payloads)

    @override
    async def serve_generator(self, role: Role, make_generator: MakeGenerator) -> None:
        closing = asyncio.Event()
        async with AsyncExitStack() as serving:
            async with self._building_alone(role.address):
                generator = make_generator(self._payloads)
                serving.push_async_callback(generator.close)
                self.generators[role.address] = generator, closing
                serving.callback(self.generators.pop, role.address)
                role.ready()
                with contextlib.suppress(Exception):  # `hello` raises it, with its type
                    await generator.ready()
            ended = await first_done(generator.failed(), closing.wait())
            if isinstance(ended, Exception):
                raise ended

    @asynccontextmanager
    async def _building_alone(self, address: str) -> AsyncIterator[None]:
        """While one engine is built, no other is, nor the trainer. One that cannot be built keeps nobody waiting."""
        self._unbuilt.add(address)
        try:
            async with self._building:
                yield
        finally:
            self._has_built = True
            self._unbuilt.discard(address)
            self._changed.set()

    @override
    def batch_sender(self) -> MemoryBatchQueue:
        return self._batches

    @override
    def sample_sender(self) -> NoReturn:
        raise AssertionError("an outside trainer has a process of its own")

    @override
    def model_state_dicts(self) -> MemoryModelStateDictStore:
        return self.store

    @override
    def payload_accounts(self) -> PayloadAccounts:
        return PayloadAccounts(self._payloads)

    @override
    def serve_log(self, log: MemoryEventLog) -> Callable[[], Awaitable[None]]:
        return partial(asyncio.sleep, 0)  # roles read the object itself

    @override
    def connect(
        self, address: str, name: str, on_report: ReportListener, payloads: PayloadAccounts | None
    ) -> GeneratorHere:
        return GeneratorHere(self, address, on_report, payloads)

    @override
    def remove(self) -> None:
        self.store.close()


class GeneratorHere(ReplicaConnection):
    """A generator of this process, called directly."""

    def __init__(
        self, transports: MemoryTransports, address: str, on_report: ReportListener, payloads: PayloadAccounts | None
    ) -> None:
        self._generator, self._closing = transports.generators[address]
        self._store, self._model = transports.store, transports.model
        self._on_report, self._payloads = on_report, payloads
        self._received = 0
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    @override
    async def hello(self, epoch: str = "", seed: int | None = None) -> WelcomeReply:
        await self._generator.ready()
        if seed is not None:
            self._generator.reseed(seed)
        self._watching = asyncio.create_task(self._watch(), name="watch over the engine")
        return WelcomeReply(
            call_id=0,
            protocol=PROTOCOL,
            model=ModelIdentity(self._model),
            limits=self._generator.limits,
            statistics=self._generator.statistics(),
        )

    @property
    @override
    def failure(self) -> Exception | None:
        return self._failed.result() if self._failed.done() else None

    @override
    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        self._require_alive()
        self._received += 1
        completion = await self._generator.generate(request, on_chunk)
        if self._payloads is not None:
            self._payloads.record(request.owner, completion.routed_experts)
        self._on_report(self._generator.statistics(), self._received)
        return completion

    @override
    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        self._require_alive()
        return await self._generator.load_model_state_dict(lambda: self._store.open(ref), ref.version)

    @override
    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        return await self._generator.interrupt(request_ids)

    @override
    async def failed(self) -> Exception:
        return await asyncio.shield(self._failed)

    @override
    def fail(self, failure: Exception) -> None:
        """Later calls fail; outstanding ones do when the engine is closed, which is next."""
        if not self._failed.done():
            self._failed.set_result(failure)

    @override
    async def close(self) -> None:
        self._closing.set()
        await self.leave()

    @override
    async def leave(self) -> None:
        self.fail(EngineFailed("the client is closed"))
        if self._watching is not None:
            await cancelled(self._watching)

    async def _watch(self) -> None:
        """Waits for the engine to fail, which may be idle."""
        self.fail(await self._generator.failed())

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed(str(self.failure)) from self.failure


def memory_transports(epoch: str) -> MemoryTransports:
    """Those of a run whose roles are in this process."""
    return _of_this_process[epoch]


@contextmanager
def new_memory_transports(log: MemoryEventLog, model: str) -> Iterator[MemoryTransports]:
    """For the roles of a new run."""
    transports = _of_this_process[log.epoch] = MemoryTransports(log, model)
    try:
        yield transports
    finally:
        del _of_this_process[log.epoch]
        transports.remove()
