"""The generators of a run: one in this very process, or a fleet of processes behind a router.

train  ── placement ──→ start_fleet ──→ started or connected generators ──→ router
eval   ── open_generate ──→ one Generator here, or the same fleet
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tailrace.config import RunSettings
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.router.router import Router
from tailrace.generation.rpc.keys import read_keys
from tailrace.lifecycle.resources import RunResources, remove_leftovers
from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.lifecycle.supervisor import Supervisor
from tailrace.records import Generate
from tailrace.run.engines import engine_factory
from tailrace.run.fleet import Fleet, ReplicaSource
from tailrace.run.folder import RunPaths
from tailrace.run.replica_sources import ConnectedGenerator, StartedGenerator
from tailrace.run.roles import RoleSettings
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

Wait: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


def start_fleet(
    settings: RunSettings,
    role: RoleSettings,
    resources: RunResources,
    supervisor: Supervisor,
    *,
    serving_model: str | None = None,
    payloads: PayloadAccounts | None = None,
) -> tuple[Router, Fleet]:
    """Start the generators that the settings ask for, or connect to those that they name.

    Who sends no weights of its own says which model they must serve already (`serving_model`). `payloads` is told of
    what completions bring.
    """
    generator = settings.generator
    router = Router(generator.replica_names, generator.router, generator.weights, max_staleness=settings.max_staleness)
    sources = _connected(settings, role, resources, serving_model, payloads) if generator.connect else None
    return router, Fleet(router, sources or _started(settings, role, supervisor, payloads), generator)


@asynccontextmanager
async def open_generate(settings: RunSettings, folder: Path) -> AsyncIterator[tuple[Generate, Wait]]:
    """Who generates with the settings' own model, and what waits for its failure and raises it.

    A single generator runs in this process, several do in processes of their own; `folder` takes their logs.
    """
    if settings.generator.replicas == 1 and not settings.generator.connect:
        async with Generator(engine_factory(settings.model, settings.generator)) as generator:
            yield generator, _for_ever
        return
    paths = RunPaths(folder)
    paths.logs.mkdir()
    await asyncio.to_thread(remove_leftovers)
    epoch = uuid.uuid4().hex
    with RunResources(epoch) as resources:
        async with AsyncExitStack() as stack:
            supervisor = await stack.enter_async_context(Supervisor(paths.logs, ShutdownSettings()))
            role = RoleSettings.of(settings, paths, epoch, resources)
            router, fleet = start_fleet(settings, role, resources, supervisor, serving_model=settings.model.name)
            stack.push_async_callback(fleet.close)
            yield router, fleet.watch


async def _for_ever() -> None:
    """Its failure is in every call."""
    await asyncio.Event().wait()


def _started(
    settings: RunSettings, role: RoleSettings, supervisor: Supervisor, payloads: PayloadAccounts | None
) -> list[ReplicaSource]:
    by_value = settings.transport.payloads == "value"
    return [
        StartedGenerator(name, index, role, settings.generator, supervisor, payloads=payloads, by_value=by_value)
        for index, name in enumerate(settings.generator.replica_names)
    ]


def _connected(
    settings: RunSettings,
    role: RoleSettings,
    resources: RunResources,
    serving_model: str | None,
    payloads: PayloadAccounts | None,
) -> list[ReplicaSource]:
    generator = settings.generator
    keys = read_keys(Path(generator.connect_key), "generator.connect_key") if generator.connect_key else None
    store = SharedMemoryModelStateDictStore(resources.shared_memory)
    return [
        ConnectedGenerator(
            name,
            address,
            epoch=role.epoch,
            settings=generator.router,
            keys=keys,
            lend_file=store.lend_file,
            serving_model=serving_model,
            payloads=payloads,
        )
        for name, address in zip(generator.replica_names, generator.connect, strict=True)
    ]
