"""Where the roles of a run live: `inline` all in one process, `local` one process each. The orchestrator can't tell.

orchestrator ── generate, published weights ──► generator
             ── batches ──► trainer ── model state dicts ──► generator
             ◄── event log ──►
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tailrace.config import RunSettings
from tailrace.errors import LifecycleError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.holding import Interrupt
from tailrace.generation.router.replica import Replica, ReplicaFigures
from tailrace.generation.router.weights import WeightDistributor
from tailrace.lifecycle.memory import trainer_environment
from tailrace.lifecycle.resources import RunResources, remove_leftovers
from tailrace.lifecycle.roles import RoleSpec
from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.lifecycle.shutdown import Action, ShutdownStage, run_stage
from tailrace.lifecycle.supervisor import Supervisor
from tailrace.records import Completion, Generate, GenerationRequest
from tailrace.run.batches import BATCH_QUEUE_CAPACITY, batch_sender
from tailrace.run.engines import engine_factory
from tailrace.run.folder import RunPaths
from tailrace.run.generators import Wait, start_fleet
from tailrace.run.payloads import ORCHESTRATOR, payload_parent
from tailrace.run.recorded_generate import RecordedGenerate
from tailrace.run.roles import TRAINER, RoleSettings, load_from_store, run_trainer_role
from tailrace.transport.batches.queue import BatchSender, MemoryBatchQueue
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.events.rpc import EventLogServer
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.store import MemoryPayloadStore
from tailrace.transport.weights.stores import MemoryModelStateDictStore

SHUTDOWN = ShutdownSettings()


@dataclass(frozen=True, slots=True)
class Placement:
    """The roles of a run, started, as the orchestrator uses them."""

    generate: Generate
    interrupt: Interrupt
    """Hands running requests back to their callers, as far as they were sampled."""
    weights: WeightDistributor
    """Brings published weights to every generator."""
    ready: Wait
    """Waits until a generator serves."""
    batches: BatchSender
    watch: Wait
    """Waits for a role that leaves early, and raises its `LifecycleError`."""
    trainer_left: Wait
    """Waits for the trainer to leave, however."""
    pids: Callable[[], Mapping[str, int]]
    """Ids of the processes that run now, by role."""
    replicas: Callable[[], list[ReplicaFigures]]
    """Figures of the generators that are processes of their own."""
    payloads: PayloadAccounts
    """Who holds what in the payload store."""
    kill: Callable[[], None]
    """Ends every role at once, without waiting, and removes what they shared."""


def open_placement(
    settings: RunSettings, paths: RunPaths, log: MemoryEventLog
) -> AbstractAsyncContextManager[Placement]:
    """Start the roles where the settings say. Close `log` before leaving the context: the trainer leaves with it."""
    return (_inline if settings.placement == "inline" else _local)(settings, paths, log)


@asynccontextmanager
async def _inline(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[Placement]:
    store, batches = MemoryModelStateDictStore(), MemoryBatchQueue(BATCH_QUEUE_CAPACITY)
    payloads = MemoryPayloadStore()
    accounts = PayloadAccounts(payloads)
    build = engine_factory(settings.model, settings.generator)
    async with Generator(build, settings.generator.weights, payloads=payloads) as generator:
        role = RoleSettings.of(settings, paths, log.epoch)
        trainer = asyncio.create_task(run_trainer_role(role, batches.receiver(), store, log, payloads), name="trainer")

        weights = WeightDistributor(settings.generator.weights)
        loading = asyncio.create_task(
            weights.follow(Replica("generator", version=0), partial(load_from_store, generator, store)), name="weights"
        )

        async def watch() -> None:
            broken = asyncio.create_task(generator.failed())
            try:
                await asyncio.wait({trainer, broken, loading}, return_when=asyncio.FIRST_COMPLETED)
                if broken.done() or loading.done():
                    failure = broken.result() if broken.done() else loading.exception()
                    raise LifecycleError(f"the generator failed: {failure}") from failure
                if error := trainer.exception():
                    raise LifecycleError(f"the trainer failed: {error}") from error
                raise LifecycleError(f"the generator failed: {await broken}")
            finally:
                broken.cancel()

        async def trainer_left() -> None:
            await asyncio.wait({trainer})

        try:
            yield Placement(
                generate=RecordedGenerate(generator, partial(_account, accounts)),
                interrupt=generator.interrupt,
                weights=weights,
                ready=generator.ready,
                batches=batches,
                watch=watch,
                trainer_left=trainer_left,
                pids=lambda: {"run": os.getpid()},
                replicas=list,
                payloads=accounts,
                kill=lambda: None,
            )
        finally:
            trainer.cancel()
            loading.cancel()
            await asyncio.gather(trainer, loading, return_exceptions=True)
            await batches.close()
            store.close()
            await accounts.close()


@asynccontextmanager
async def _local(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[Placement]:
    parent = payload_parent(settings, paths.root)
    await asyncio.to_thread(remove_leftovers)
    if parent is not None:
        await asyncio.to_thread(remove_leftovers, parent)
    with RunResources(log.epoch, payload_parent=parent) as resources:
        async with contextlib.AsyncExitStack() as stack:
            supervisor = await stack.enter_async_context(Supervisor(paths.logs, SHUTDOWN))
            server = EventLogServer(log, resources.address("events"))
            stack.push_async_callback(
                _end, ShutdownStage.CLOSE_EVENT_LOG, lambda: _let_trainer_leave(supervisor, server)
            )
            role = RoleSettings.of(settings, paths, log.epoch, resources)
            accounts = PayloadAccounts(role.payload_store(settings, writer=ORCHESTRATOR))
            stack.push_async_callback(accounts.close)
            router, fleet = start_fleet(settings, role, resources, supervisor, payloads=accounts)
            supervisor.start(
                RoleSpec(
                    "trainer",
                    TRAINER,
                    role.encoded(),
                    threads=settings.trainer.threads,
                    environment=trainer_environment(os.environ),
                )
            )
            stack.push_async_callback(_end, ShutdownStage.STOP_GENERATORS, fleet.close)
            batches = batch_sender(
                settings, resources.address("batches"), shared_memory=resources.shared_memory, files=paths.batches
            )
            stack.push_async_callback(_end, ShutdownStage.CLOSE_TRANSPORTS, batches.close)

            async def watch() -> None:
                watching = {asyncio.create_task(supervisor.watch()), asyncio.create_task(fleet.watch())}
                try:
                    done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
                    done.pop().result()
                finally:
                    for task in watching:
                        task.cancel()
                    await asyncio.gather(*watching, return_exceptions=True)

            async def trainer_left() -> None:
                await supervisor.wait("trainer")

            def kill() -> None:
                supervisor.kill()
                resources.remove()

            yield Placement(
                generate=router,
                interrupt=router.interrupt,
                weights=router.weights,
                ready=router.serving,
                batches=batches,
                watch=watch,
                trainer_left=trainer_left,
                pids=lambda: {"orchestrator": os.getpid(), **supervisor.pids()},
                replicas=router.figures,
                payloads=accounts,
                kill=kill,
            )


def _account(accounts: PayloadAccounts, request: GenerationRequest, completion: Completion) -> None:
    accounts.record(request.owner, completion.routed_experts)


async def _end(stage: ShutdownStage, action: Action) -> None:
    await run_stage(stage, SHUTDOWN, action)


async def _let_trainer_leave(supervisor: Supervisor, server: EventLogServer) -> None:
    """The event log has ended, and the trainer leaves by itself; the supervisor ends it if it doesn't in time."""
    supervisor.expect_exit("trainer")
    await server.close()
    await supervisor.wait("trainer")
