"""What the trainer's and the generator's process run. Each builds its parts from the run's settings alone."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import msgspec

from tailrace.config import RunSettings
from tailrace.errors import CheckpointError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.lifecycle.resources import RunResources
from tailrace.records import ModelStateDictRef, RunStatus, TrainerEnded
from tailrace.reporting.logs import setup_logging
from tailrace.run.batches import batch_receiver
from tailrace.run.engines import engine_factory
from tailrace.run.folder import RunPaths
from tailrace.run.parts import make_trainer
from tailrace.run.payloads import open_payload_store
from tailrace.run.phases import recording_phases, watched_loop
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.tracing.phases import PhaseRecorder
from tailrace.transport.batches.queue import BatchReceiver
from tailrace.transport.events.log import EventLog
from tailrace.transport.events.rpc import EventLogClient
from tailrace.transport.payloads.store import MemoryPayloadStore, PayloadStore
from tailrace.transport.weights.stores import ModelStateDictStore, SharedMemoryModelStateDictStore

TRAINER = "tailrace.run.roles:trainer"
GENERATOR = "tailrace.run.roles:generator"


class RoleSettings(msgspec.Struct, frozen=True):
    """What a role's process is told."""

    settings: str
    """The run's settings, as JSON."""
    run_folder: str
    epoch: str
    sockets: str = ""
    shared_memory: str = ""
    payloads: str = ""
    """Folder for payloads that shared memory has no room for."""
    name: str = ""
    """Of the role's process."""
    socket: str = ""
    """Where a generator listens, in `sockets`."""
    seed: int = 0
    """Of a generator's random streams: no two processes may draw the same."""

    @classmethod
    def of(
        cls, settings: RunSettings, paths: RunPaths, epoch: str, resources: RunResources | None = None
    ) -> RoleSettings:
        """Of this run; `resources` where roles are processes of their own."""
        return cls(
            settings=settings.model_dump_json(),
            run_folder=str(paths.root),
            epoch=epoch,
            sockets=str(resources.sockets) if resources else "",
            shared_memory=str(resources.shared_memory) if resources else "",
            payloads=str(resources.payloads) if resources else "",
        )

    @property
    def run(self) -> RunSettings:
        """The run's settings."""
        return RunSettings.model_validate_json(self.settings)

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(Path(self.run_folder))

    def address(self, name: str) -> str:
        """The address of the run's socket `name`."""
        return f"ipc://{self.sockets}/{name}"

    def payload_store(self, settings: RunSettings, *, writer: str = "") -> PayloadStore:
        """This process's end of the run's payload store."""
        return open_payload_store(settings, Path(self.shared_memory), Path(self.payloads), writer=writer)

    def encoded(self) -> bytes:
        """For the settings of a `RoleSpec`."""
        return msgspec.json.encode(self)


async def trainer(encoded: bytes) -> None:
    """The trainer's process. Leaves when the event log ends: by then its terminal record was read."""
    role = msgspec.json.decode(encoded, type=RoleSettings)
    setup_logging("trainer", role.paths.logs, level=role.run.observability.log_level)
    importlib.import_module("tailrace.training.loop")  # takes seconds, before anybody watches the loop
    async with (
        recording_phases("trainer", role.paths, role.run.observability) as phases,
        watched_loop(role.run.observability, phases),
    ):
        await asyncio.create_task(_serve_trainer(role, phases), name="trainer")


async def _serve_trainer(role: RoleSettings, phases: PhaseRecorder) -> None:
    log = EventLogClient(role.address("events"), role.epoch)
    batches = batch_receiver(
        role.run, role.address("batches"), shared_memory=Path(role.shared_memory), files=role.paths.batches
    )
    store = SharedMemoryModelStateDictStore(Path(role.shared_memory))
    payloads = role.payload_store(role.run)
    try:
        await run_trainer_role(role, batches, store, log, payloads, phases=phases)
        async for _ in log.follow():
            pass
    finally:
        await batches.close()
        payloads.close()
        store.close()
        await log.close()


async def run_trainer_role(
    role: RoleSettings,
    batches: BatchReceiver,
    store: ModelStateDictStore,
    log: EventLog,
    payloads: PayloadStore,
    *,
    phases: PhaseRecorder | None = None,
) -> None:
    """Train until the terminal record, which this writes on every way out.

    `phases` of a process of its own are told with each step.
    """
    from tailrace.training.checkpoints import latest_checkpoint
    from tailrace.training.loop import TrainerPlan, run_trainer

    settings = role.run
    try:
        newest = latest_checkpoint(role.paths.checkpoints) if settings.resume else None
        if newest is not None:
            await asyncio.to_thread(_adopt_scheduler_state, role.paths, newest)
    except CheckpointError as error:
        await log.append(TrainerEnded(epoch=role.epoch, status=RunStatus.FAILED, step=0, reason=str(error)))
        raise
    plan = TrainerPlan(
        epoch=role.epoch,
        checkpoints=role.paths.checkpoints,
        resume_from=newest,
        publish_dtype=settings.model.dtype,
        phases=phases,
    )
    open_payload = payloads.open if settings.generator.return_routed_experts else None
    await run_trainer(lambda: make_trainer(settings, open_payload), batches, store, log, plan)


def _adopt_scheduler_state(paths: RunPaths, checkpoint: Path) -> None:
    """Older versions kept the scheduler's state in the checkpoint: put it where the orchestrator reads it now."""
    from tailrace.training.checkpoints import read_manifest, scheduler_state_in

    states, step = SchedulerStates(paths.scheduler, paths.checkpoints), read_manifest(checkpoint).step
    if not states.path(step).exists() and (state := scheduler_state_in(checkpoint)):
        states.write(step, state, trained_step=step)


async def generator(encoded: bytes) -> None:
    """The generator's process. Serves until its client closes it, or it is terminated."""
    role = msgspec.json.decode(encoded, type=RoleSettings)
    settings = role.run
    setup_logging(role.name, role.paths.logs, level=settings.observability.log_level)
    async with (
        recording_phases(role.name, role.paths, settings.observability) as phases,
        watched_loop(settings.observability, phases),
    ):
        await asyncio.create_task(_serve_generator(role, settings), name=role.name)


async def _serve_generator(role: RoleSettings, settings: RunSettings) -> None:
    seeded = settings.generator.model_copy(update={"seed": role.seed})
    store = SharedMemoryModelStateDictStore(Path(role.shared_memory))
    payloads = MemoryPayloadStore() if settings.transport.payloads == "value" else None
    store_of_run = payloads or role.payload_store(settings, writer=role.socket)
    engine = Generator(engine_factory(settings.model, seeded), settings.generator.weights, payloads=store_of_run)
    try:
        # It serves while the engine is built: what that raises is told to whoever says hello, with its type.
        await GeneratorServer(
            engine,
            store.open,
            role.address(role.socket),
            model=settings.model.name,
            report_every_s=settings.generator.router.report_every_s,
            forwarded=payloads,
        ).serve()
    finally:
        await engine.close()
        store_of_run.close()
        store.close()


async def load_from_store(generator: Generator, store: ModelStateDictStore, ref: ModelStateDictRef) -> int:
    """Install published weights in a generator of this process."""
    return await generator.load_model_state_dict(lambda: store.open(ref), ref.version)
