"""The roles of a run, started by the launcher that the settings name, and ended in order.

orchestrator ── generate, load_model_state_dict ──► generators
             ── batches ──► trainer ── model state dicts ──► generators
             ── groups to be scored ──► teacher, where the loss has one that is not behind an endpoint
             ◄── event log ──►
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec

from tailrace.config import RunSettings
from tailrace.config.restarts import RestartSettings
from tailrace.lifecycle.cluster import ClusterPlan
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.launchers import Launcher, RoleHandle, launcher_class
from tailrace.lifecycle.memory import trainer_environment
from tailrace.lifecycle.processes import STACKS_S, loopback_environment
from tailrace.lifecycle.restarts import RestartHistory
from tailrace.lifecycle.roles import RoleSpec
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage
from tailrace.records import Generate
from tailrace.run.agent_places import HostedPlace
from tailrace.run.cluster import role_groups, spare_groups
from tailrace.run.devices import in_own_process, role_devices
from tailrace.run.folder import RunPaths
from tailrace.run.generators import Generators
from tailrace.run.host_transports import HostTransports, host_transports, restarts_trainer
from tailrace.run.join_requests import JoinHandler, listen_for_generators
from tailrace.run.memory_transports import new_memory_transports
from tailrace.run.outside_trainer import OutsideTrainer
from tailrace.run.replica_sources import ConnectedGenerator, StartedGenerator
from tailrace.run.roles import AGENT_WORKER, GENERATOR, TEACHER_ENTRY, TRAINER, RoleSettings
from tailrace.run.teacher import TEACHER, teacher_settings
from tailrace.run.trainer_lives import TrainerLives
from tailrace.run.trainer_ranks import LaunchedRanks, launched_rank
from tailrace.run.transports import Transports
from tailrace.transport.batches.channels import ChannelBatchSender
from tailrace.transport.batches.queue import BatchSender
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.weights.lending import LendingFigures

Watch: TypeAlias = Callable[[], Coroutine[Any, Any, NoReturn]]


class StartedRoles:
    """The roles of a run, as the orchestrator uses them. Make it on a running event loop; it starts them."""

    def __init__(self, starter: RoleStarter, log: MemoryEventLog) -> None:
        self.shutdown = starter.settings.shutdown
        self._launcher, self._transports = starter.launcher, starter.transports
        self.trainer = starter.trainer_of(log)
        self.payloads = self._transports.payload_accounts()
        if isinstance(self.trainer, TrainerLives):
            self.trainer.keep(self.payloads)
        self.generators = starter.start_generators(payloads=self.payloads)
        self.teacher = starter.start_teacher()
        """Of one generator, which no weights are sent to; None where the loss needs none here."""
        self.agent_places = starter.agent_places()
        """Of agent workers that are roles; None where they are children of this process."""
        self._has_others = (
            self._launcher.has_roles_elsewhere
            or bool(starter.settings.generator.connect)
            or starter.launched is not None
            or isinstance(self.trainer, OutsideTrainer)
        )

    async def watch(self) -> NoReturn:
        """Wait for a trainer, a teacher or a last generator that ends early and is not started again, and raise why.

        Or for a Redis that stays away.
        """
        others = [] if self.teacher is None else [self.teacher.watch()]
        others += [] if self.redis is None else [self.redis.watch()]
        await first_done(self._launcher.watch(), self.trainer.watch(), self.generators.watch(), *others)

    @property
    def lending(self) -> LendingFigures:
        """Of weights that were sent to generators which do not share this host's memory."""
        transports = self._transports
        return transports.lending if isinstance(transports, HostTransports) else LendingFigures()

    @property
    def redis(self) -> RedisPlace | None:
        """Where batches and events, or samples for an outside trainer, go through Redis."""
        transports = self._transports
        return transports.redis or transports.samples if isinstance(transports, HostTransports) else None

    def pids(self) -> dict[str, int]:
        """Ids of the processes that run now, by role."""
        name = "run" if self._launcher.runs_in_this_process else "orchestrator"
        return {name: os.getpid(), **self._launcher.pids()}

    @property
    def has_had_others(self) -> bool:
        """Whether a role runs, or ran, in a process that is none of `pids`: on another machine, or started by another.

        What it takes nobody here can tell.
        """
        return self._has_others or self.generators.had_guests

    async def write_stacks(self) -> None:
        """Let every process write the stacks of its threads into its log, as far as it can."""
        self._launcher.write_stacks()
        await asyncio.sleep(STACKS_S)

    async def shut_down(self) -> None:
        """In this order, each stage with its deadline. Rollouts are cancelled and the trainer has saved before."""
        self.trainer.let_end()
        for stage, action in (
            (ShutdownStage.CLOSE_TRANSPORTS, self.trainer.end_feed),
            (ShutdownStage.STOP_GENERATORS, self._stop_generators),
            (ShutdownStage.CLOSE_EVENT_LOG, self.trainer.leave),
        ):
            await run_stage(stage, self.shutdown, action)
        await self.trainer.close()
        await self.payloads.close()

    def kill(self) -> None:
        """End every role at once, without waiting, and remove what they shared."""
        self._launcher.kill()
        self._transports.remove()

    async def _stop_generators(self) -> None:
        teachers = [] if self.teacher is None else [self.teacher.close()]
        await asyncio.gather(self.generators.close(), *teachers)


@asynccontextmanager
async def start_roles(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[StartedRoles]:
    """Start the roles. Close `log` before leaving, which ends the trainer. Raises `SettingsError`, `LifecycleError`."""
    async with _role_starter(settings, paths, log) as starter:
        roles = StartedRoles(starter, log)
        try:
            async with starter.joining(roles):
                yield roles
        finally:
            await roles.shut_down()


@asynccontextmanager
async def open_generate(settings: RunSettings, folder: Path) -> AsyncIterator[tuple[Generate, Watch]]:
    """`Generate` with the settings' own model, and a coroutine function that raises its failure once there is one.

    The settings are those of generators alone (`without_training`), which write their logs into `folder`.
    """
    async with _role_starter(settings, RunPaths(folder), MemoryEventLog(uuid.uuid4().hex)) as starter:
        generators = starter.start_generators(with_trainer=False)
        try:
            await first_done(generators.watch(), generators.router.serving())
            yield generators.router.generate, generators.watch
        finally:
            await generators.close()


@dataclass(frozen=True, slots=True)
class RoleStarter:
    """Starts roles with the launcher that the settings name, joined by the transports that suit it."""

    settings: RunSettings
    launcher: Launcher
    transports: Transports
    devices: Mapping[str, tuple[str, ...]]
    paths: RunPaths
    launched: LaunchedRanks | None = None
    """Processes that another launcher started for the trainer's other ranks; None: they are started here."""

    @property
    def trainer_restarts(self) -> RestartSettings:
        """Those that the trainer is granted: none in this process, nor of ranks that another launcher started."""
        chosen, is_ours = self.settings.restarts, isinstance(self.transports, HostTransports) and self.launched is None
        is_restarted = is_ours and restarts_trainer(self.settings)
        return chosen if is_restarted else chosen.model_copy(update={"per_role": 0})

    def trainer_of(self, log: MemoryEventLog) -> TrainerLives | OutsideTrainer:
        """Ours, which this starts, or one that somebody else does."""
        if self.settings.trainer.feed == "stream":
            is_sent = self.settings.transport.weights == "nccl"
            store = None if is_sent else self.transports.model_state_dicts()
            last_read_s = self.settings.evaluation.finish_s
            return OutsideTrainer(self.transports.sample_sender(), store, log, last_read_s=last_read_s)
        return TrainerLives(self, log, RestartHistory(self.trainer_restarts))

    def start_trainer(self, earlier: Sequence[RoleHandle] = ()) -> list[RoleHandle]:
        """All of its ranks, rank 0 first; `earlier` are those of the life before, which have left."""
        for rank in earlier:
            rank.start_next_life(self._role_settings)
        if earlier:
            return [*earlier]
        chosen, environment = self.settings.trainer, trainer_environment(os.environ)
        if chosen.ranks > 1:
            environment |= loopback_environment()
        specs = [self._spec(name, TRAINER, chosen.threads, environment) for name in chosen.rank_names]
        if self.launched is None:
            return [self.launcher.start(spec, is_replaceable=True) for spec in specs]
        self.launched.give_roles(specs[1:])
        return [self.launcher.start(specs[0], is_replaceable=True)]

    async def end_trainer_life(self, batches: BatchSender) -> None:
        """New addresses for the next life, at which `batches` waits for it."""
        assert isinstance(self.transports, HostTransports)
        assert isinstance(batches, ChannelBatchSender)
        await self.transports.end_trainer_life(self.launcher, batches)

    def forget_weights(self, before_life: int) -> None:
        """Remove what earlier lives of the trainer published."""
        assert isinstance(self.transports, HostTransports)
        self.transports.forget_weights(before_life)

    def start_generators(self, *, payloads: PayloadAccounts | None = None, with_trainer: bool = True) -> Generators:
        """Those that the settings ask for, or name; these must serve the model's weights unless a trainer sends its."""
        chosen, launcher, transports = self.settings.generator, self.launcher, self.transports
        if not chosen.connect:
            names = chosen.replica_names + (chosen.spare_names if launcher.may_grow else ())
            specs = [self._spec(name, GENERATOR, chosen.threads) for name in names]
            started = [StartedGenerator(spec, launcher, transports, payloads) for spec in specs]
            return Generators(self.settings, started)
        assert isinstance(transports, HostTransports)
        connect = partial(
            ConnectedGenerator,
            settings=self.settings,
            epoch=launcher.epoch,
            lend=transports.lender.lend if with_trainer else None,
            for_training=with_trainer,
            payloads=payloads,
        )
        connected = map(connect, chosen.replica_names, chosen.connect)
        return Generators(self.settings, [*connected], awaits_weights=with_trainer)

    @asynccontextmanager
    async def joining(self, roles: StartedRoles) -> AsyncIterator[None]:
        """Where generators may join, as long as they may."""
        if not self.settings.generator.replicas.may_join:
            yield
            return
        assert isinstance(self.transports, HostTransports)
        bring = self.transports.bringing()
        handler = JoinHandler(
            self.settings,
            roles.generators,
            self.launcher.epoch,
            role=self._role_settings if bring is None else b"",
            lend=self.transports.lender.lend,
            bring=bring,
            payloads=roles.payloads,
        )
        async with listen_for_generators(handler, self.paths.join):
            yield

    def start_teacher(self) -> Generators | None:
        """A generator that holds the teacher of the loss, where it is not behind an endpoint."""
        if (settings := teacher_settings(self.settings)) is None:
            return None
        spec = self._spec(TEACHER, TEACHER_ENTRY, settings.generator.threads)
        return Generators(settings, [StartedGenerator(spec, self.launcher, self.transports)])

    def agent_places(self) -> list[HostedPlace] | None:
        """One for each agent worker, where the launcher has them and a number of them is asked for."""
        names = self.settings.rollouts.hosted_worker_names if self.launcher.hosts_agents else ()
        if not names:
            return None
        assert isinstance(self.transports, HostTransports)
        return [HostedPlace(self._spec(name, AGENT_WORKER, 1), self.launcher, self.transports) for name in names]

    @property
    def _role_settings(self) -> bytes:
        """As of now: each life of the trainer is found elsewhere."""
        where = self.transports.where if isinstance(self.transports, HostTransports) else None
        run = in_own_process(self.settings, self.devices).model_dump_json()
        return msgspec.json.encode(RoleSettings(run, str(self.paths.root), self.launcher.epoch, where))

    def _spec(self, name: str, entry: str, threads: int, environment: Mapping[str, str] | None = None) -> RoleSpec:
        return RoleSpec(name, entry, self._role_settings, threads, self.devices.get(name), environment or {})


@asynccontextmanager
async def _role_starter(settings: RunSettings, paths: RunPaths, log: MemoryEventLog) -> AsyncIterator[RoleStarter]:
    """On leaving, every role that still runs is ended."""
    devices = await asyncio.to_thread(role_devices, settings)
    async with AsyncExitStack() as stack:
        launcher = launcher_class(settings.placement)(log.epoch, paths.logs, settings.shutdown)
        launcher.restarts = settings.restarts
        launcher.inherited = () if paths.owned is None else (paths.owned.descriptor,)
        if launcher.finds_devices:
            groups, spare = role_groups(settings), spare_groups(settings)
            launcher.cluster = ClusterPlan(settings.name, settings.ray, groups, paths.root, spare)
        stack.callback(launcher.kill)
        await launcher.reserve()
        if launcher.runs_in_this_process:
            transports: Transports = stack.enter_context(new_memory_transports(log, settings.model.name))
        else:
            transports = await stack.enter_async_context(host_transports(settings, paths, launcher))
        await stack.enter_async_context(launcher)
        rank = None if launcher.runs_in_this_process else launched_rank(settings.trainer)
        launched = None if rank is None else await asyncio.to_thread(LaunchedRanks, rank)  # which imports torch
        yield RoleStarter(settings, launcher, transports, devices, paths, launched)
