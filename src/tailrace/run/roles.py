"""What the trainer and the generators run, wherever they are. Each builds its parts from the run's settings alone."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from tailrace.config import RunSettings
from tailrace.errors import CheckpointError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.records import RunStatus, TrainerEnded
from tailrace.reporting.logs import setup_logging
from tailrace.run.engines import engine_factory
from tailrace.run.folder import RunPaths
from tailrace.run.host_transports import HostTransports, Whereabouts
from tailrace.run.memory_transports import memory_transports
from tailrace.run.parts import make_trainer
from tailrace.run.phases import recording_phases, watched_loop
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.transports import TrainerEnds, Transports
from tailrace.tracing.phases import PhaseRecorder

_TRAINER = "tailrace.run.roles:trainer"
_GENERATOR = "tailrace.run.roles:generator"


class RoleSettings(msgspec.Struct, frozen=True):
    """What a role is told."""

    settings: str
    """The run's settings, as JSON."""
    run_folder: str
    epoch: str
    where: Whereabouts | None
    """Of what joins it to the other roles; None where they are in its own process."""
    index: int = 0
    """Of a generator among all."""

    @classmethod
    def of(cls, settings: RunSettings, paths: RunPaths, epoch: str, transports: Transports) -> RoleSettings:
        """Of this run."""
        where = transports.where if isinstance(transports, HostTransports) else None
        return cls(settings.model_dump_json(), str(paths.root), epoch, where)

    @property
    def run(self) -> RunSettings:
        """The run's settings."""
        return RunSettings.model_validate_json(self.settings)

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(Path(self.run_folder))

    def transports(self) -> Transports:
        """In the role's process."""
        return HostTransports(self.where, self.run) if self.where is not None else memory_transports(self.epoch)


def trainer_spec(
    role_settings: RoleSettings, devices: tuple[str, ...] | None, environment: Mapping[str, str]
) -> RoleSpec:
    """The trainer, with these GPUs and variables of its own."""
    return RoleSpec(
        "trainer",
        _TRAINER,
        msgspec.json.encode(role_settings),
        threads=role_settings.run.trainer.threads,
        devices=devices,
        environment=environment,
    )


def generator_specs(role_settings: RoleSettings, devices: Mapping[str, tuple[str, ...]]) -> list[RoleSpec]:
    """Every generator that the settings ask for, with its GPUs by its name."""
    chosen = role_settings.run.generator
    return [
        RoleSpec(
            name,
            _GENERATOR,
            msgspec.json.encode(msgspec.structs.replace(role_settings, index=index)),
            threads=chosen.threads,
            devices=devices.get(name),
        )
        for index, name in enumerate(chosen.replica_names)
    ]


async def trainer(role: Role) -> None:
    """Trains. Leaves when the event log ends: by then its terminal record was read."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    if role.has_own_process:
        importlib.import_module("tailrace.training.loop")  # takes seconds, before anybody watches the loop
    async with _observed(role, role_settings) as phases, role_settings.transports().trainer() as ends:
        role.ready()
        await _train(role_settings, ends, phases)
        async for _ in ends.log.follow():
            pass


async def _train(role_settings: RoleSettings, ends: TrainerEnds, phases: PhaseRecorder | None) -> None:
    """Train until the terminal record, which this writes on every way out."""
    from tailrace.training.checkpoints import latest_checkpoint
    from tailrace.training.loop import TrainerPlan, run_trainer

    settings = role_settings.run
    try:
        newest = latest_checkpoint(role_settings.paths.checkpoints) if settings.resume else None
        if newest is not None:
            await asyncio.to_thread(_adopt_scheduler_state, role_settings.paths, newest)
    except CheckpointError as error:
        await ends.log.append(
            TrainerEnded(epoch=role_settings.epoch, status=RunStatus.FAILED, step=0, reason=str(error))
        )
        raise
    plan = TrainerPlan(
        epoch=role_settings.epoch,
        checkpoints=role_settings.paths.checkpoints,
        resume_from=newest,
        publish_dtype=settings.model.dtype,
        phases=phases,
    )
    open_payload = ends.payloads.open if settings.generator.return_routed_experts else None
    make = lambda: make_trainer(settings, open_payload)  # noqa: E731
    await run_trainer(make, ends.batches, ends.model_state_dicts, ends.log, plan)


def _adopt_scheduler_state(paths: RunPaths, checkpoint: Path) -> None:
    """Older versions kept the scheduler's state in the checkpoint: put it where the orchestrator reads it now."""
    from tailrace.training.checkpoints import read_manifest, scheduler_state_in

    states, step = SchedulerStates(paths.scheduler, paths.checkpoints), read_manifest(checkpoint).step
    if not states.path(step).exists() and (state := scheduler_state_in(checkpoint)):
        states.write(step, state)


async def generator(role: Role) -> None:
    """Generates until its client closes it, or it is terminated.

    It is ready before its engine is built: what that raises is told to whoever says hello, with its type.
    """
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    settings = role_settings.run
    seed = _seed(settings.generator.seed, role_settings.index, role.life)
    seeded = settings.generator.model_copy(update={"seed": seed})
    async with _observed(role, role_settings):
        with role_settings.transports().generator(role) as ends:
            factory = engine_factory(settings.model, seeded)
            engine = Generator(factory, settings.generator.weights, payloads=ends.payloads)
            try:
                await ends.serve(engine)
            finally:
                await engine.close()


@asynccontextmanager
async def _observed(role: Role, role_settings: RoleSettings) -> AsyncIterator[PhaseRecorder | None]:
    """Measures and logs what a process of its own does; the orchestrator's does so already."""
    if not role.has_own_process:
        yield None
        return
    name, chosen = role.spec.name, role_settings.run.observability
    setup_logging(name, role_settings.paths.logs, level=chosen.log_level)
    async with AsyncExitStack() as stack:
        phases = await stack.enter_async_context(recording_phases(name, role_settings.paths, chosen))
        await stack.enter_async_context(watched_loop(chosen, phases))
        yield phases


def _seed(seed: int, index: int, life: int) -> int:
    """Of one life of one generator's random streams: that of the settings for the very first, never one twice."""
    if index == life == 0:
        return seed
    return int(np.random.SeedSequence([seed, index, life]).generate_state(1)[0]) % 2**31
