"""The parts of a training run, made in order, each finished before the next one is given it.

roles ─► observer ─► rollouter ─► scheduler ─► evaluator ─► gauges ─► orchestrator
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

from tailrace.config import RunSettings
from tailrace.gateway import Gateway, require_free_ports
from tailrace.generation.holding import HoldingGenerate
from tailrace.generation.recorded_generate import RecordedGenerate
from tailrace.lifecycle.launchers import launcher_class
from tailrace.lifecycle.memory import RESERVED_BYTES_PER_ROLLOUT, heap_of_process
from tailrace.lifecycle.open_files import raise_file_limit
from tailrace.lifecycle.trimming import MemoryTrimmer
from tailrace.records import Task
from tailrace.replay.capture import CaptureWriter
from tailrace.reporting.gauges import (
    ProcessGauge,
    SchedulerGauge,
    agent_worker_gauges,
    environment_gauge,
    feed_gauge,
    payload_gauge,
    phase_gauge,
    redis_gauge,
    replica_gauge,
    usage_gauge,
    weights_gauge,
)
from tailrace.reporting.observer import MetricsListener, RunObserver
from tailrace.reporting.run_view import RunView, snapshot
from tailrace.reporting.sinks import JsonlSink, RolloutWriter, RunWriters
from tailrace.reporting.tokens import TokenWriter
from tailrace.reporting.trackers.hub import Trackers
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter
from tailrace.run.asked import asked_policies
from tailrace.run.callbacks import Callbacks
from tailrace.run.folder import RunPaths, writing
from tailrace.run.orchestrator import Orchestrator
from tailrace.run.outside import offered, waits_for_clients
from tailrace.run.outside_trainer import OutsideTrainer
from tailrace.run.parts import agent_workers_here, held_out_tasks, open_rollouter, with_own_judges
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.started_roles import StartedRoles, start_roles
from tailrace.run.teacher import make_teacher
from tailrace.scheduling import (
    Evaluator,
    FeedScheduler,
    SchedulerSetup,
    StreamScheduler,
    TaskSource,
    TaskStream,
)
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.log_files import LogFile
from tailrace.tracing.phases import PhaseRecorder
from tailrace.transport.events.log import FileEventLog


@dataclass(frozen=True, slots=True)
class RunGround:
    """What a run is composed from. Make it on the running event loop."""

    settings: RunSettings
    paths: RunPaths
    environments: dict[str, LoadedEnvironment]
    renderer: ChatRenderer
    phases: PhaseRecorder
    """Of this process, as is the next one."""
    lag: LoopLagMonitor
    listener: MetricsListener = field(default_factory=Callbacks)
    trackers: Trackers = field(default_factory=Trackers)
    began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    started_at: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    @property
    def elapsed_s(self) -> float:
        """Since the run began."""
        return asyncio.get_running_loop().time() - self.began_s

    def view(self) -> RunView:
        """Of a run whose roles are not there yet."""
        settings, environments = self.settings, self.settings.environments
        # Of the mix that the weights ask for, which counts tasks.
        weights = sum(environment.weight for environment in environments)
        rollouts = sum(settings.group_size(environment) * environment.weight for environment in environments)
        return RunView(
            name=settings.name,
            model=settings.model.name,
            environments=[environment.id or environment.name for environment in environments],
            waiting_for="the processes to start",
            elapsed_s=self.elapsed_s,
            max_steps=settings.max_steps,
            max_staleness=settings.max_staleness,
            replicas_min=max(len(settings.generator.connect), settings.generator.replicas.min),
            replicas_max=max(len(settings.generator.connect), settings.generator.replicas.max),
            groups_per_batch=round(settings.scheduling.batch_size * weights / rollouts),
        )


@dataclass(frozen=True, slots=True)
class ComposedRun:
    """The parts of a run that run it, show it and sum it up."""

    ground: RunGround
    roles: StartedRoles
    gateway: Gateway
    writers: RunWriters
    observer: RunObserver
    rollouter: Rollouter
    scheduler: StreamScheduler | FeedScheduler
    evaluator: Evaluator
    orchestrator: Orchestrator

    def kill(self) -> None:
        """End every process of it at once, without waiting."""
        self.rollouter.kill()
        self.roles.kill()

    def view(self) -> RunView:
        """Where the run is now."""
        orchestrator = self.orchestrator
        so_far = replace(
            self.ground.view(),
            stage=orchestrator.stage,
            waiting_for=self._waits_for_outside or orchestrator.start_waits_for or waits_for_clients(self.gateway),
            step=orchestrator.step,
            policy_version=orchestrator.version,
            moves=orchestrator.events + self.roles.generators.engine_steps,
            replicas=self.roles.generators.pool.serving,
            replica_losses=self.roles.generators.losses,
        )
        return snapshot(
            so_far,
            observer=self.observer,
            ledger=self.scheduler.ledger,
            statistics=self.scheduler.statistics,
            evaluator=self.evaluator,
            lag=self.ground.lag.snapshot(),
        )

    @property
    def _waits_for_outside(self) -> str:
        """For people, where it is a trainer that is not ours."""
        orchestrator, scheduler = self.orchestrator, self.scheduler
        if not isinstance(scheduler, FeedScheduler) or orchestrator.has_ended:
            return ""
        has_weights = orchestrator.installed_version >= orchestrator.version
        if has_weights or orchestrator.has_begun or self.roles.generators.router.weights.newest is not None:
            return scheduler.describe_waiting()
        return scheduler.describe_waiting() or (
            f"the outside trainer to write weights of version {orchestrator.version}, with which it begins"
        )


@contextlib.asynccontextmanager
async def compose(ground: RunGround) -> AsyncIterator[ComposedRun]:
    """Start the roles, and make all parts around them; on leaving, the roles are ended."""
    settings, paths, environments = ground.settings, ground.paths, ground.environments
    raise_file_limit()
    require_free_ports(settings.gateway, agent_workers_here(settings, environments))  # taken once roles are there
    with writing(paths.root):
        log = FileEventLog(paths.events, uuid.uuid4().hex)
    writers = RunWriters(queue_records=settings.observability.queue_records)
    async with contextlib.AsyncExitStack() as stack:
        roles = await stack.enter_async_context(start_roles(with_own_judges(settings, environments), paths, log))
        stack.push_async_callback(log.close)
        observer = _observer(ground, writers, roles)
        holding = HoldingGenerate(roles.generators.router.generate, roles.generators.router.interrupt)
        generate = RecordedGenerate(holding, observer.completion_sampled, observer.request_cancelled)
        gateway = Gateway(settings.gateway, model=settings.model.name)
        rollouter = await stack.enter_async_context(
            open_rollouter(
                settings,
                environments,
                renderer=ground.renderer,
                generate=generate,
                teacher=make_teacher(settings, ground.renderer, roles.teacher),
                paths=paths,
                gateway=gateway,
                agent_places=roles.agent_places,
            )
        )
        asked = asked_policies(ground.renderer, holding, settings.max_model_tokens)
        observer.add_gauges(*await stack.enter_async_context(offered(environments, gateway, paths.gateway, asked)))
        sources = [TaskSource(loaded.spec, loaded.weight) for loaded in environments.values()]
        tasks = TaskStream(sources, seed=settings.seed, max_epochs=settings.max_epochs)
        states = SchedulerStates(paths.scheduler, paths.checkpoints)
        scheduler = _scheduler(
            ground, roles, tasks=tasks, rollouter=rollouter, observer=observer, states=states, holding=holding
        )
        if roles.redis is not None:
            roles.redis.tell(scheduler.hold)
        evaluator = Evaluator(
            await asyncio.to_thread(_held_out, settings, environments),
            rollouter.runner(evaluation_seed=settings.seed, on_ended=observer.held_out_ended),
            observer.evaluated,
            settings=settings.evaluation,
            scheduling=settings.scheduling,
            max_running=settings.max_running,
            lend=scheduler.lend,
        )
        lost_before = LogFile.lost_bytes
        if settings.generator.replicas.may_join and settings.scheduling.max_in_flight is None:
            roles.generators.follow_slots(partial(_resize, scheduler, evaluator))
        if roles.generators.may_grow:
            roles.generators.follow_load(partial(_rollouts, scheduler))
        observer.add_gauges(
            *(
                SchedulerGauge(lambda: scheduler.statistics),
                ProcessGauge(_pids(roles, rollouter)),
                lambda: {"cpu/elsewhere": 1.0} if roles.has_had_others else {},
                phase_gauge(ground.phases),
            ),
            *agent_worker_gauges(rollouter.agent_workers),
            _trimmer(settings, writers.records).step_ended,
            lambda: ground.lag.flush().metrics(),
            environment_gauge(lambda: tasks.environments),
            replica_gauge(roles.generators.router.replicas),
            roles.generators.metrics,
            usage_gauge(lambda: rollouter.judge_usage),
            usage_gauge(lambda: rollouter.teacher_usage),
            payload_gauge(roles.payloads),
            weights_gauge(lambda: roles.lending),
            redis_gauge(roles.redis),
            lambda: {"training/restarts": roles.trainer.restarts},
            ground.trackers.metrics,
            lambda: {
                "sinks/dropped_records": writers.lost_records,
                "sinks/lost_log_bytes": LogFile.lost_bytes - lost_before,
            },
        )
        orchestrator = Orchestrator(
            roles,
            log,
            paths,
            rollouter=rollouter,
            scheduler=scheduler,
            states=states,
            observer=observer,
            evaluator=evaluator,
        )
        yield ComposedRun(ground, roles, gateway, writers, observer, rollouter, scheduler, evaluator, orchestrator)


def _scheduler(
    ground: RunGround,
    roles: StartedRoles,
    *,
    tasks: TaskStream,
    rollouter: Rollouter,
    observer: RunObserver,
    states: SchedulerStates,
    holding: HoldingGenerate,
) -> StreamScheduler | FeedScheduler:
    """Of batches for the run's own trainer, or of samples for one that is not ours."""
    settings, environments = ground.settings, ground.environments
    setup = SchedulerSetup(
        settings=settings.scheduling,
        max_staleness=settings.max_staleness,
        max_running=settings.max_running,
        group_sizes={name: loaded.group_size for name, loaded in environments.items()},
        whole_groups=[name for name, loaded in environments.items() if loaded.spec.needs_whole_group],
        save_state=lambda step, state: asyncio.to_thread(states.write, step, state),
    )
    runner, trainer = rollouter.runner(on_lost=observer.rollout_lost), roles.trainer
    if isinstance(trainer, OutsideTrainer):
        retained_bytes = int(settings.restarts.retained_mb * 1e6)
        feed = FeedScheduler(tasks, runner, trainer.samples, observer, setup, retained_bytes=retained_bytes)
        trainer.listen(feed)
        observer.add_gauges(feed_gauge(lambda: feed.figures))
        return feed
    return StreamScheduler(
        *(tasks, runner, trainer.batches.send, observer, setup),
        max_steps=settings.max_steps,
        num_ranks=settings.trainer.row_groups,
        holder=holding,
    )


def _observer(ground: RunGround, writers: RunWriters, roles: StartedRoles) -> RunObserver:
    settings, paths, writer = ground.settings, ground.paths, writers.records
    chosen = settings.observability
    return RunObserver(
        metrics=JsonlSink(paths.metrics, writer),
        rollouts=RolloutWriter(paths.rollouts, writer, every_steps=chosen.rollouts_every_steps),
        tokens=TokenWriter(
            paths.tokens,
            writers.tokens,
            ground.renderer.text,
            every_steps=chosen.tokens_every_steps,
            max_bytes=int(chosen.tokens_mb * 1e6),
        ),
        capture=CaptureWriter(
            paths.capture,
            writer,
            steps=chosen.capture,
            max_bytes=int(chosen.capture_mb * 1e6),
            settings_json=settings.model_dump_json(),
        ),
        listener=ground.listener,
        trackers=ground.trackers,
        submit=writer.submit,
        release_payloads=roles.payloads.release,
    )


def _rollouts(scheduler: StreamScheduler | FeedScheduler) -> int:
    """That run, those of an evaluation beside training counted as the slots that are kept for them."""
    statistics = scheduler.statistics
    return statistics.running + statistics.lent_slots


def _resize(scheduler: StreamScheduler | FeedScheduler, evaluator: Evaluator, slots: int) -> None:
    """Generators joined or left: as much runs at once as those which are there have slots for."""
    scheduler.resize(slots)
    evaluator.resize(slots)


def _pids(roles: StartedRoles, rollouter: Rollouter) -> Callable[[], dict[str, int]]:
    """Of all processes of the run, by role."""
    agents = rollouter.agent_workers
    return roles.pids if agents is None else lambda: {**roles.pids(), **agents.pids()}


def _held_out(settings: RunSettings, environments: Mapping[str, LoadedEnvironment]) -> list[Task]:
    """What evaluations beside training run, every environment in turn. Making it may take a while."""
    chosen = settings.evaluation
    if chosen.every_steps is None:
        return []
    drawn = [held_out_tasks(one, settings.seed, chosen.tasks) for one in environments.values()]
    return [task for turn in zip_longest(*drawn) for task in turn if task is not None]


def _trimmer(settings: RunSettings, writer: BackgroundWriter) -> MemoryTrimmer:
    """What was reserved for rollouts in flight is not too much. A trainer in this process keeps its own memory."""
    trim_mb, is_apart = settings.observability.trim_mb, not launcher_class(settings.placement).runs_in_this_process
    reserved = settings.max_running * RESERVED_BYTES_PER_ROLLOUT
    return MemoryTrimmer(
        int(trim_mb * 1e6) + reserved, writer.submit, heap_of_process() if trim_mb and is_apart else None
    )
