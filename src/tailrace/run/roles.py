"""What the trainer and the generators run, wherever they are. Each builds its parts from the run's settings alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import msgspec

from tailrace.cancelling import cancelled
from tailrace.child_processes import describe_exit
from tailrace.config import RunSettings
from tailrace.errors import CheckpointError, LifecycleError, TransportError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.vllm.nodes import Nodes
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.lifecycle.garbage import import_large
from tailrace.lifecycle.launchers import launcher_class
from tailrace.lifecycle.roles import Role
from tailrace.records import RunStatus, StopRequested, TrainerEnded
from tailrace.reporting.logs import setup_logging
from tailrace.rollouts.agent_workers.places import LocalPlace
from tailrace.run.engines import engine_factory, with_adapters, with_weight_transfer
from tailrace.run.folder import RunPaths
from tailrace.run.host_transports import HostTransports, TransportAddresses, restarts_trainer
from tailrace.run.memory_transports import memory_transports
from tailrace.run.phases import observed_process
from tailrace.run.teacher import teacher_settings
from tailrace.run.trainer_ranks import launched_rank, trainer_store
from tailrace.run.transports import TrainerEnds, Transports
from tailrace.tracing.output_log import OutputLog
from tailrace.tracing.phases import PhaseRecorder
from tailrace.training.settings.trainer import ExportFormat
from tailrace.transport.events.log import EventLog
from tailrace.transport.payloads.store import PayloadStore
from tailrace.transport.redis.server import RedisServer

if TYPE_CHECKING:
    from tailrace.training.ranks import JoinedRanks, Ranks
    from tailrace.training.reports.token_export import TokenExport
    from tailrace.training.trainer import Trainer

TRAINER = "tailrace.run.roles:trainer"
GENERATOR = "tailrace.run.roles:generator"
AGENT_WORKER = "tailrace.run.roles:agent_worker"
TEACHER_ENTRY = "tailrace.run.roles:teacher"

Working: TypeAlias = Callable[[str], AbstractContextManager[object]]

_ENDLESS = 2**31 - 1
"""Steps of a run that ends by epochs: the learning rate's decay has no end to fall to."""


class RoleSettings(msgspec.Struct, frozen=True):
    """The settings of every role, as JSON in its `RoleSpec`."""

    settings: str
    """The run's settings, as JSON."""
    run_folder: str
    epoch: str
    where: TransportAddresses | None
    """Addresses and folders that join it to the other roles; None where they are in its own process."""

    @property
    def run(self) -> RunSettings:
        """The run's settings."""
        return RunSettings.model_validate_json(self.settings)

    @property
    def trainer_life(self) -> int:
        """How often the trainer of this start of the run was started before."""
        return self.where.trainer_life if self.where is not None else 0

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(Path(self.run_folder))

    def transports(self) -> Transports:
        """In the role's process."""
        return HostTransports(self.where, self.run) if self.where is not None else memory_transports(self.epoch)


async def trainer(role: Role) -> None:
    """Trains, as the rank that its name says."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    rank = role_settings.run.trainer.rank_names.index(role.spec.name)
    if role.has_own_process:
        import_large("tailrace.training.leading")  # takes seconds, before anybody watches the loop
    async with _observed(role, role_settings) as phases:
        await train_rank(
            role_settings, rank, address=role.address, phases=phases, on_ready=role.ready, working=role.working
        )


async def train_rank(
    role_settings: RoleSettings,
    rank: int,
    *,
    address: str = "",
    phases: PhaseRecorder | None = None,
    on_ready: Callable[[], None] = lambda: None,
    working: Working = nullcontext,
) -> None:
    """All that one rank of the trainer does, however its process was started: rank 0 leads, the others follow.

    `address` is where its role may listen.

    Ends when the event log does: by then the terminal record was read. Raises what failed in this rank.
    """
    async with role_settings.transports().trainer(rank, address) as ends:
        over = asyncio.create_task(_end_of(ends.log), name="end of the event log")
        on_ready()
        try:
            if rank == 0:
                await _lead(role_settings, ends, phases, working)
            else:
                await _follow(role_settings, rank, ends)
            await over
        finally:
            await cancelled(over)


async def _end_of(log: EventLog) -> None:
    async for _ in log.follow():
        pass


async def _follow(role_settings: RoleSettings, rank: int, ends: TrainerEnds) -> None:
    from tailrace.training.leading import follow
    from tailrace.training.trainer import Trainer

    name = role_settings.run.trainer.rank_names[rank]

    async def request_stop(reason: str) -> None:
        stop = StopRequested(epoch=role_settings.epoch, role=name, status=RunStatus.FAILED, reason=reason)
        with contextlib.suppress(TransportError):  # the run has ended meanwhile
            await ends.log.append(stop)

    ranks = await asyncio.to_thread(_join_ranks, role_settings, rank)
    async with _token_export(role_settings.run, role_settings.paths, rank) as export:
        make_trainer = _make_trainer(Trainer, role_settings, ends, ranks, export)
        await follow(make_trainer, ends.batches, ranks, request_stop)


def _join_ranks(role_settings: RoleSettings, rank: int) -> JoinedRanks:
    """Wait for the other ranks, and join them. Raises `RankLost`."""
    from tailrace.training.ranks import JoinedRanks

    chosen, where = role_settings.run.trainer, role_settings.where
    assert where is not None, "ranks of one process"
    store = trainer_store(where, chosen.ranks)
    return JoinedRanks(
        store,
        rank,
        chosen.ranks,
        device=chosen.device,
        deadline_s=chosen.collective_timeout_s,
        ranks_per_row=chosen.sequence_parallel,
    )


def _make_trainer(
    kind: Callable[..., Trainer],
    role_settings: RoleSettings,
    ends: TrainerEnds,
    ranks: Ranks,
    export: TokenExport | None,
) -> Callable[[], Trainer]:
    settings = role_settings.run

    def make() -> Trainer:
        import_large("transformers.modeling_utils")  # by which the model is loaded
        return kind(
            settings.trainer,
            model_name=settings.model.name,
            max_steps=settings.max_steps or _ENDLESS,
            max_staleness=settings.max_staleness,
            seed=settings.seed,
            open_payload=ends.payloads.open if settings.generator.return_routed_experts else None,
            export=export,
            nonfinite_folder=role_settings.paths.nonfinite,
            ranks=ranks,
        )

    return make


async def _lead(role_settings: RoleSettings, ends: TrainerEnds, phases: PhaseRecorder | None, working: Working) -> None:
    """Train until the terminal record, which this writes on every way out."""
    from tailrace.training.checkpoints.files import latest_checkpoint, put_back
    from tailrace.training.leading import LeadingTrainer
    from tailrace.training.loop import TrainerPlan, reason_and_class, run_trainer
    from tailrace.training.ranks import ALONE
    from tailrace.training.trainer import Trainer

    settings, paths = role_settings.run, role_settings.paths
    try:
        put_back(paths.checkpoints)
        newest = latest_checkpoint(paths.checkpoints) if settings.resume or role_settings.trainer_life else None
    except CheckpointError as error:
        reason, kind = reason_and_class(error)
        record = TrainerEnded(epoch=role_settings.epoch, status=RunStatus.FAILED, step=0, reason=reason, error=kind)
        await ends.log.append(record)
        raise
    plan = TrainerPlan(
        epoch=role_settings.epoch,
        checkpoints=paths.checkpoints,
        resume_from=newest,
        publishes_first=bool(settings.generator.connect),
        publish_dtype=settings.model.dtype,
        working=working,
        phases=phases,
        is_elsewhere=launcher_class(settings.placement).has_roles_elsewhere,
        restarts_ranks=role_settings.where is not None
        and restarts_trainer(settings)
        and launched_rank(settings.trainer) is None,
    )

    def make_trainer() -> Trainer:
        if settings.trainer.ranks == 1:
            return _make_trainer(Trainer, role_settings, ends, ALONE, export)()
        return _make_trainer(LeadingTrainer, role_settings, ends, _join_ranks(role_settings, 0), export)()

    async with _token_export(settings, paths, rank=0) as export:
        await run_trainer(make_trainer, ends.batches, ends.model_state_dicts, ends.log, plan)


@asynccontextmanager
async def _token_export(settings: RunSettings, paths: RunPaths, rank: int) -> AsyncIterator[TokenExport | None]:
    """Where a rank of the trainer leaves the tokens that it trained on, if anywhere."""
    form, every_steps = settings.trainer.export_tokens, 1
    if form is None:  # beside what the orchestrator writes of rollouts, token by token
        form, every_steps = "parquet", settings.observability.tokens_every_steps
    if not every_steps:
        yield None
        return
    export = await asyncio.to_thread(_open_export, settings, paths, form, rank, every_steps)
    try:
        yield export
    finally:
        await asyncio.to_thread(export.close)


def _open_export(
    settings: RunSettings, paths: RunPaths, form: ExportFormat, rank: int, every_steps: int
) -> TokenExport:
    from tokenizers import Tokenizer

    from tailrace.models.loading import tokenizer_folder
    from tailrace.training.reports.token_export import TokenExport

    folder = tokenizer_folder(settings.model.name, paths.tokenizer)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    beside_rollouts = settings.trainer.export_tokens is None
    return TokenExport(
        paths.tokens, tokenizer, form, rank=rank, every_steps=every_steps, beside_rollouts=beside_rollouts
    )


async def generator(role: Role) -> None:
    """Generates until its client closes it. Ready before its engine is built: `hello` raises that build's error."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    settings = role_settings.run
    chosen = with_adapters(settings.generator, settings.trainer.lora)
    await _serve(role, role_settings, settings.model, with_weight_transfer(chosen, settings.transport))


async def teacher(role: Role) -> None:
    """Scores tokens until its client closes it, with the weights that it began with."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    settings = teacher_settings(role_settings.run)
    assert settings is not None, "no teacher"
    await _serve(role, role_settings, settings.model, settings.generator)


async def agent_worker(role: Role) -> None:
    """Starts the processes of one agent worker, and passes on what they say, until the orchestrator is gone."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    transports = role_settings.transports()
    assert isinstance(transports, HostTransports), "an agent worker beside the scheduler is its own child"
    setup_logging(role.spec.name, role_settings.paths.logs, level=role_settings.run.observability.log_level)
    with closing(OutputLog(role_settings.paths.logs / f"{role.spec.name}.output.log")) as output:
        await transports.serve_agent_worker(role, LocalPlace(output, shares_memory=False))


async def redis(role: Role) -> None:
    """A Redis server of this run's own, which ends with this role. Raises `LifecycleError` where it ends by itself."""
    server = RedisServer(Path(os.fsdecode(role.spec.settings)))
    try:
        await asyncio.to_thread(server.start)
        role.ready(server.url)
        status = await asyncio.to_thread(server.wait)
    finally:
        server.kill()
    raise LifecycleError(f"the run's own Redis ended, {describe_exit(status)}")


async def _serve(role: Role, role_settings: RoleSettings, model: ModelSettings, chosen: GeneratorSettings) -> None:
    nodes = _nodes(role, role_settings)
    async with _observed(role, role_settings):
        if nodes is not None and nodes.number > 0:
            from tailrace.generation.engines.vllm.core import hold_workers

            role.ready()
            await asyncio.to_thread(hold_workers, model, chosen, nodes)  # which raises in the end

        def make_generator(payloads: PayloadStore) -> Generator:
            engine = engine_factory(model, chosen, nodes=nodes)
            return Generator(engine, chosen.weights, payloads=payloads)

        await role_settings.transports().serve_generator(role, make_generator)


def _nodes(role: Role, role_settings: RoleSettings) -> Nodes | None:
    """Those of an engine whose workers are on several."""
    share, where = role.spec.share, role_settings.where
    if share is None:
        return None
    assert where is not None, "nodes of one process"
    own_host = urlsplit(role.address).hostname or share.host
    return Nodes(share.number, share.count, own_host, share.host, share.port, Path(where.shared_memory))


@asynccontextmanager
async def _observed(role: Role, role_settings: RoleSettings) -> AsyncIterator[PhaseRecorder | None]:
    """Measures and logs a process of its own; the orchestrator does so for its own process."""
    if not role.has_own_process:
        yield None
        return
    name, chosen = role.spec.name, role_settings.run.observability
    setup_logging(name, role_settings.paths.logs, level=chosen.log_level)
    async with observed_process(name, role_settings.paths, chosen) as (phases, _):
        yield phases
