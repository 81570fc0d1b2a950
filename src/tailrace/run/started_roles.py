"""The roles of a run, started by the launcher that the settings name, and ended in order.

orchestrator ── generate, load_model_state_dict ──► generators
             ── batches ──► trainer ── model state dicts ──► generators
             ◄── event log ──►
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tailrace.config import RunSettings
from tailrace.lifecycle.launchers import Launcher, RoleHandle, launcher_class
from tailrace.lifecycle.memory import trainer_environment
from tailrace.lifecycle.resources import remove_leftovers
from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage
from tailrace.records import Generate
from tailrace.run.devices import in_own_process, role_devices
from tailrace.run.folder import RunPaths
from tailrace.run.generators import Generators, ReplicaSource
from tailrace.run.host_transports import HostTransports, host_transports, payload_folder
from tailrace.run.memory_transports import new_memory_transports
from tailrace.run.replica_sources import StartedGenerator, connected_generators
from tailrace.run.roles import RoleSettings, generator_specs, trainer_spec
from tailrace.run.transports import Transports
from tailrace.transport.batches.queue import BatchSender
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.payloads.accounts import PayloadAccounts

SHUTDOWN = ShutdownSettings()

Wait: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class StartedRoles:
    """The roles of a run, as the orchestrator uses them. Make it on a running event loop; it starts them."""

    generators: Generators
    trainer: RoleHandle
    batches: BatchSender
    payloads: PayloadAccounts
    """Who holds what in the payload store."""

    def __init__(self, ground: _Ground, log: MemoryEventLog) -> None:
        transports = ground.transports
        self._launcher, self._transports = ground.launcher, transports
        self.trainer = ground.launcher.start(
            trainer_spec(ground.role_settings, ground.devices.get("trainer"), trainer_environment(os.environ))
        )
        self.batches = transports.batch_sender()
        self._end_log = transports.serve_log(log)
        self.payloads = transports.payload_accounts()
        self.generators = _start_generators(ground, payloads=self.payloads)

    async def watch(self) -> None:
        """Wait for a role that leaves early, or for the last generator's failure, and raise it. Returns never."""
        watching = {asyncio.create_task(self._launcher.watch()), asyncio.create_task(self.generators.watch())}
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def pids(self) -> dict[str, int]:
        """Ids of the processes that run now, by role."""
        name = "run" if self._launcher.runs_in_this_process else "orchestrator"
        return {name: os.getpid(), **self._launcher.pids()}

    async def shut_down(self) -> None:
        """In this order, each stage with its deadline. Rollouts are cancelled and the trainer has saved before."""
        for stage, action in (
            (ShutdownStage.CLOSE_TRANSPORTS, self.batches.close),
            (ShutdownStage.STOP_GENERATORS, self.generators.close),
            (ShutdownStage.CLOSE_EVENT_LOG, self._let_trainer_leave),
        ):
            await run_stage(stage, SHUTDOWN, action)
        await self.payloads.close()

    def kill(self) -> None:
        """End every role at once, without waiting, and remove what they shared."""
        self._launcher.kill()
        self._transports.remove()

    async def _let_trainer_leave(self) -> None:
        """The event log has ended, and the trainer leaves by itself; the launcher ends it if it doesn't in time."""
        self.trainer.expect_exit()
        await self._end_log()
        await self.trainer.left()


@asynccontextmanager
async def start_roles(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[StartedRoles]:
    """Start the roles where the settings say. Close `log` before leaving the context: the trainer leaves with it.

    Raises `SettingsError` for what cannot be started with these settings, and `LifecycleError`.
    """
    async with _opened(settings, paths, log) as ground:
        roles = StartedRoles(ground, log)
        try:
            yield roles
        finally:
            await roles.shut_down()


@asynccontextmanager
async def open_generate(settings: RunSettings, folder: Path) -> AsyncIterator[tuple[Generate, Wait]]:
    """Who generates with the settings' own model, and what waits for its failure and raises it.

    A single generator runs in this process, several do in processes of their own; `folder` takes their logs.
    """
    is_alone = settings.generator.replicas == 1 and not settings.generator.connect
    placed = settings.model_copy(update={"placement": "inline" if is_alone else "local"})
    async with _opened(placed, RunPaths(folder), MemoryEventLog(uuid.uuid4().hex)) as ground:
        generators = _start_generators(ground, serving_model=settings.model.name)
        try:
            await generators.serving()
            yield generators.router.generate, generators.watch
        finally:
            await generators.close()


@dataclass(frozen=True, slots=True)
class _Ground:
    """What roles are started from."""

    settings: RunSettings
    launcher: Launcher
    transports: Transports
    devices: Mapping[str, tuple[str, ...]]
    role_settings: RoleSettings


@asynccontextmanager
async def _opened(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[_Ground]:
    """The launcher that the settings name, and what will join its roles."""
    devices = await asyncio.to_thread(role_devices, settings)
    async with AsyncExitStack() as stack:
        launcher = launcher_class(settings.placement)(log.epoch, paths.logs, SHUTDOWN)
        stack.callback(launcher.kill)
        if launcher.runs_in_this_process:
            transports: Transports = stack.enter_context(new_memory_transports(log, settings.model.name))
        else:
            await asyncio.to_thread(remove_leftovers)
            if (folder := payload_folder(settings, paths)) is not None:
                await asyncio.to_thread(remove_leftovers, folder)
            transports = stack.enter_context(host_transports(settings, paths, launcher))
        await stack.enter_async_context(launcher)
        role_settings = RoleSettings.of(in_own_process(settings, devices), paths, log.epoch, transports)
        yield _Ground(settings, launcher, transports, devices, role_settings)


def _start_generators(
    ground: _Ground, *, payloads: PayloadAccounts | None = None, serving_model: str | None = None
) -> Generators:
    """Those that the settings ask for, or that they name.

    Who sends no weights of its own says which model they must serve already (`serving_model`). `payloads` is told of
    what completions bring.
    """
    settings, transports = ground.settings, ground.transports
    if settings.generator.connect:
        assert isinstance(transports, HostTransports)
        lend_file, epoch = transports.lent_files(), ground.launcher.epoch
        sources: Sequence[ReplicaSource] = connected_generators(
            settings, epoch, lend_file, serving_model=serving_model, payloads=payloads
        )
    else:
        sources = [
            StartedGenerator(spec, ground.launcher, transports, payloads)
            for spec in generator_specs(ground.role_settings, ground.devices)
        ]
    return Generators(settings, sources)
