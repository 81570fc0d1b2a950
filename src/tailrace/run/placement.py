"""Where the roles of a run live: `inline` all in one process, `local` one process each. The orchestrator can't tell.

orchestrator ── generate, load_model_state_dict ──► generator
             ── batches ──► trainer ── model state dicts ──► generator
             ◄── event log ──►
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from tailrace.config import RunSettings
from tailrace.errors import LifecycleError
from tailrace.generation.generator import Generator
from tailrace.generation.rpc import GeneratorClient
from tailrace.lifecycle.resources import RunResources, remove_leftovers
from tailrace.lifecycle.roles import RoleSpec
from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.lifecycle.shutdown import Action, ShutdownStage, run_stage
from tailrace.lifecycle.supervisor import Supervisor
from tailrace.records import Generate, ModelStateDictRef
from tailrace.run.folder import RunPaths
from tailrace.run.parts import engine_factory
from tailrace.run.roles import GENERATOR, TRAINER, RoleSettings, load_from_store, run_trainer_role
from tailrace.transport.batch_queue import BatchSender, MemoryBatchQueue
from tailrace.transport.event_log import MemoryEventLog
from tailrace.transport.event_log_rpc import EventLogServer
from tailrace.transport.model_state_dicts import MemoryModelStateDictStore
from tailrace.transport.shared_memory import SharedMemoryBatchSender

SHUTDOWN = ShutdownSettings()
BATCH_QUEUE_CAPACITY = 3
"""More than the scheduler sends ahead, so that it never waits inside `send`."""

Wait: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Placement:
    """The roles of a run, started, as the orchestrator uses them."""

    generate: Generate
    load_model_state_dict: Callable[[ModelStateDictRef], Awaitable[int]]
    """Installs weights in the generator; returns the version really installed."""
    ready: Wait
    """Waits until the generator serves."""
    batches: BatchSender
    watch: Wait
    """Waits for a role that leaves early, and raises its `LifecycleError`."""
    trainer_left: Wait
    """Waits for the trainer to leave, however."""
    pids: Mapping[str, int]
    """Process ids by role."""
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
    async with Generator(engine_factory(settings), settings.generator.weights) as generator:
        role = RoleSettings.of(settings, paths, log.epoch)
        trainer = asyncio.create_task(run_trainer_role(role, batches, store, log), name="trainer")

        async def watch() -> None:
            await asyncio.wait({trainer})
            if error := trainer.exception():
                raise LifecycleError(f"the trainer failed: {error}") from error
            await asyncio.Event().wait()

        async def trainer_left() -> None:
            await asyncio.wait({trainer})

        try:
            yield Placement(
                generate=generator,
                load_model_state_dict=lambda ref: load_from_store(generator, store, ref),
                ready=generator.ready,
                batches=batches,
                watch=watch,
                trainer_left=trainer_left,
                pids={"run": os.getpid()},
                kill=lambda: None,
            )
        finally:
            trainer.cancel()
            await asyncio.gather(trainer, return_exceptions=True)
            await batches.close()
            store.close()


@asynccontextmanager
async def _local(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[Placement]:
    await asyncio.to_thread(remove_leftovers)
    with RunResources(log.epoch) as resources:
        async with contextlib.AsyncExitStack() as stack:
            supervisor = await stack.enter_async_context(Supervisor(paths.logs, SHUTDOWN))
            server = EventLogServer(log, resources.address("events"))
            stack.push_async_callback(
                _end, ShutdownStage.CLOSE_EVENT_LOG, lambda: _let_trainer_leave(supervisor, server)
            )
            role = RoleSettings.of(settings, paths, log.epoch, resources).encoded()
            generator = supervisor.start(RoleSpec("generator", GENERATOR, role, threads=settings.generator.threads))
            trainer = supervisor.start(RoleSpec("trainer", TRAINER, role, threads=settings.trainer.threads))
            client = GeneratorClient(resources.address("generator"))
            stack.push_async_callback(_end, ShutdownStage.STOP_GENERATORS, client.close)
            batches = SharedMemoryBatchSender(
                resources.address("batches"), resources.shared_memory, capacity=BATCH_QUEUE_CAPACITY
            )
            stack.push_async_callback(_end, ShutdownStage.CLOSE_TRANSPORTS, batches.close)
            stack.callback(supervisor.expect_exit, "generator")

            async def watch() -> None:
                try:
                    await supervisor.watch()
                except LifecycleError as error:
                    client.fail(error)
                    raise

            async def trainer_left() -> None:
                await supervisor.wait("trainer")

            def kill() -> None:
                supervisor.kill()
                resources.remove()

            async def ready() -> None:
                await client.statistics()

            yield Placement(
                generate=client,
                load_model_state_dict=client.load_model_state_dict,
                ready=ready,
                batches=batches,
                watch=watch,
                trainer_left=trainer_left,
                pids={"orchestrator": os.getpid(), "generator": generator.pid, "trainer": trainer.pid},
                kill=kill,
            )


async def _end(stage: ShutdownStage, action: Action) -> None:
    await run_stage(stage, SHUTDOWN, action)


async def _let_trainer_leave(supervisor: Supervisor, server: EventLogServer) -> None:
    """The event log has ended, and the trainer leaves by itself; the supervisor ends it if it doesn't in time."""
    supervisor.expect_exit("trainer")
    await server.close()
    await supervisor.wait("trainer")
