"""`tailrace train`: from settings to a trained model, a summary and a report."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from itertools import zip_longest
from pathlib import Path

from tailrace.config import RunSettings, plan_run
from tailrace.errors import TailraceError
from tailrace.generation.holding import HoldingGenerate
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.lifecycle.memory import RESERVED_BYTES_PER_ROLLOUT, heap_of_process, reserve_memory, share_one_arena
from tailrace.lifecycle.signals import StopSignals
from tailrace.lifecycle.trimming import MemoryTrimmer
from tailrace.records import Completion, GenerationRequest, RunStatus, Task, TrainerEnded, TrainerStarted
from tailrace.replay.capture import CaptureWriter
from tailrace.reporting.live import LiveView, wants_live_view
from tailrace.reporting.logs import Terminal, setup_logging
from tailrace.reporting.report import write_report
from tailrace.reporting.run_view import RunView
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.summary import RunSummary, write_summary
from tailrace.reporting.usage import ProcessMeter
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter
from tailrace.run.engines import require_engine
from tailrace.run.folder import RunPaths, find_run_folder, make_run_folder, wind_back
from tailrace.run.observer import RunObserver
from tailrace.run.orchestrator import Orchestrator, Scheduling, WeightsInstalled
from tailrace.run.parts import (
    held_out_tasks,
    load_environments,
    make_renderer,
    make_rollouter,
    require_held_out_tasks,
    task_stream,
)
from tailrace.run.phases import ORCHESTRATOR, recording_phases, traced_run, watched_loop
from tailrace.run.placement import Placement, open_placement
from tailrace.run.recorded_generate import RecordedGenerate
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.summary import Figures, figures
from tailrace.run.view import run_view
from tailrace.scheduling import Evaluator, StreamScheduler
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.phases import PhaseRecorder
from tailrace.transport.events.log import FileEventLog

_logger = logging.getLogger(__name__)

_PACKAGES = ("tailrace", "torch", "transformers", "numpy")


async def train(settings: RunSettings, parent: Path = Path("runs")) -> RunSummary:
    """Train, and leave a run's folder under `parent`. The summary's exit code tells how it ended.

    Raises `SettingsError`, `DataError` or `ModelError` before anything is started.
    """
    if settings.placement == "local":  # a trainer in this process has its own wishes
        share_one_arena()
    require_engine(settings.generator)
    environments = await asyncio.to_thread(load_environments, settings)
    if settings.evaluation.every_steps is not None:
        require_held_out_tasks(environments)
    paths = find_run_folder(settings, parent)
    renderer = await asyncio.to_thread(make_renderer, settings, paths.tokenizer)
    make_run_folder(settings, paths)
    observability = settings.observability
    terminal = Terminal.LIVE if wants_live_view(observability.live) else Terminal.LINES
    recent = setup_logging("orchestrator", paths.logs, terminal, level=observability.log_level)
    plan = plan_run(settings, _training_tasks(environments))
    for sentence in plan.describe():
        _logger.info(sentence)
    async with contextlib.AsyncExitStack() as stack:
        if settings.placement == "local":  # tensors in cycles live elsewhere
            stack.enter_context(hold_old_objects())
            reserve_memory(plan.max_running)
        await stack.enter_async_context(traced_run(paths, observability))
        phases = await stack.enter_async_context(recording_phases(ORCHESTRATOR, paths, observability))
        lag = await stack.enter_async_context(watched_loop(observability, phases))
        run = _Training(settings, paths, environments, renderer, lag=lag, phases=phases)
        live = LiveView(
            run.view,
            terminal=terminal is Terminal.LIVE,
            recent=recent,
            log_every_s=observability.log_every_s,
            no_progress_s=observability.no_progress_s,
        )
        await stack.enter_async_context(live)
        summary = await run.run(live)
    if observability.report:
        await asyncio.to_thread(_write_report, paths)
    return summary


def _training_tasks(environments: Mapping[str, LoadedEnvironment]) -> dict[str, int]:
    """How many each has."""
    return {name: len(loaded.spec.train_tasks) for name, loaded in environments.items()}


class _Training:
    """One training run's parts, for as long as it runs."""

    def __init__(
        self,
        settings: RunSettings,
        paths: RunPaths,
        environments: dict[str, LoadedEnvironment],
        renderer: ChatRenderer,
        *,
        lag: LoopLagMonitor,
        phases: PhaseRecorder,
    ) -> None:
        self._settings, self._paths, self._environments, self._lag = settings, paths, environments, lag
        self._phases = phases
        self._renderer = renderer
        self._states = SchedulerStates(paths.scheduler, paths.checkpoints)
        self._orchestrator: Orchestrator | None = None
        self._holding: HoldingGenerate | None = None
        self._held_out: list[Task] = []
        self._writer = BackgroundWriter(queue_records=settings.observability.queue_records)
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def view(self) -> RunView:
        """For the live view."""
        return run_view(self._settings, self._orchestrator, self._lag, self._clock() - self._began_s)

    async def run(self, live: LiveView) -> RunSummary:
        """Start everything, run to the terminal record, stop everything, sum up."""
        log = FileEventLog(self._paths.events, uuid.uuid4().hex)
        async with contextlib.AsyncExitStack() as stack:
            placement = await stack.enter_async_context(open_placement(self._settings, self._paths, log))
            stack.push_async_callback(log.close)
            meter = ProcessMeter(placement.pids)
            holding = self._holding = HoldingGenerate(placement.generate, placement.interrupt)
            rollouter = await stack.enter_async_context(
                make_rollouter(
                    self._settings,
                    self._environments,
                    renderer=self._renderer,
                    generate=RecordedGenerate(holding, self._count_completion, self._count_cancelled),
                    log_folder=self._paths.logs,
                )
            )
            self._held_out = await asyncio.to_thread(self._make_held_out)
            orchestrator = self._orchestrator = Orchestrator(
                placement,
                log,
                rollouter.start,
                lambda started, installed: self._start(started, installed, placement, rollouter, meter),
            )
            signals = stack.enter_context(self._signals(orchestrator, placement, live))
            ended = await orchestrator.run()
        return await self._sum_up(orchestrator, ended, meter, signals)

    def _count_completion(self, _: GenerationRequest, completion: Completion) -> None:
        if self._orchestrator and self._orchestrator.observer:
            self._orchestrator.observer.completion_sampled(completion)

    def _count_cancelled(self, request: GenerationRequest, tokens: int) -> None:
        if self._orchestrator and self._orchestrator.observer:
            self._orchestrator.observer.request_cancelled(request, tokens)

    def _make_held_out(self) -> list[Task]:
        """What evaluations beside training run, every environment in turn; made before, since it may take a while."""
        chosen = self._settings.evaluation
        if chosen.every_steps is None:
            return []
        environments = self._environments.values()
        drawn = [held_out_tasks(one, self._settings.seed, chosen.tasks) for one in environments]
        return [task for turn in zip_longest(*drawn) for task in turn if task is not None]

    def _start(
        self,
        started: TrainerStarted,
        installed: WeightsInstalled,
        placement: Placement,
        rollouter: Rollouter,
        meter: ProcessMeter,
    ) -> Scheduling:
        """The scheduler, its observer and the evaluator, from where the trainer is."""
        settings, observability = self._settings, self._settings.observability
        tasks = task_stream(settings, self._environments)
        if settings.resume:
            wind_back(self._paths, started.step)
        observer = RunObserver(
            metrics=JsonlSink(self._paths.metrics, self._writer),
            rollouts=RolloutWriter(self._paths.rollouts, self._writer, every_steps=observability.rollouts_every_steps),
            lag=self._lag,
            phases=self._phases,
            trimmer=self._trimmer(),
            capture=CaptureWriter(
                self._paths.capture,
                self._writer,
                steps=observability.capture,
                max_bytes=int(observability.capture_mb * 1e6),
                settings_json=settings.model_dump_json(),
            ),
            meter=meter,
            statistics=lambda: scheduler.statistics,
            replicas=placement.replicas,
            environments=lambda: tasks.environments,
            judge_usage=lambda: rollouter.judge_usage,
            payloads=placement.payloads,
        )
        scheduler = StreamScheduler(
            tasks,
            rollouter.runner(on_lost=observer.rollout_lost),
            placement.batches.send,
            observer,
            settings=settings.scheduling,
            max_staleness=settings.max_staleness,
            max_running=settings.max_running,
            group_sizes={name: loaded.group_size for name, loaded in self._environments.items()},
            whole_groups=[name for name, loaded in self._environments.items() if loaded.spec.needs_whole_group],
            max_steps=settings.max_steps,
            save_state=self._save_state,
            holder=self._holding,
        )
        scheduler.start(
            step=started.step,
            version=started.version,
            serving_version=self._orchestrator.installed_version if self._orchestrator else started.version,
            state=self._states.read(started.step),
        )
        evaluator = Evaluator(
            self._held_out,
            rollouter.runner(evaluation_seed=settings.seed, on_ended=placement.payloads.release),
            observer.evaluated,
            settings=settings.evaluation,
            max_running=settings.max_running,
            lend=scheduler.lend,
            installed=installed,
        )
        return Scheduling(scheduler, observer, evaluator if self._held_out else None)

    async def _save_state(self, step: int, state: bytes) -> None:
        assert self._orchestrator is not None
        await asyncio.to_thread(self._states.write, step, state, trained_step=self._orchestrator.step)

    def _trimmer(self) -> MemoryTrimmer:
        """What was reserved for rollouts in flight is not too much. A trainer in this process keeps its own memory."""
        trim_mb, is_apart = self._settings.observability.trim_mb, self._settings.placement == "local"
        reserved = self._settings.max_running * RESERVED_BYTES_PER_ROLLOUT
        heap = heap_of_process() if trim_mb and is_apart else None
        return MemoryTrimmer(int(trim_mb * 1e6) + reserved, self._writer.submit, heap)

    def _signals(self, orchestrator: Orchestrator, placement: Placement, live: LiveView) -> StopSignals:
        """Once: an orderly stop. Twice: everything at once."""
        wishes: set[asyncio.Task[None]] = set()

        def request_stop(code: ExitCode) -> None:
            why = "interrupted" if code is ExitCode.INTERRUPTED else "terminated"
            wishes.add(asyncio.ensure_future(orchestrator.request_stop(RunStatus.CANCELLED, why)))

        def abort(code: ExitCode) -> None:
            placement.kill()
            live.release_terminal()
            os._exit(code)

        return StopSignals(request_stop, abort)

    async def _sum_up(
        self, orchestrator: Orchestrator, ended: TrainerEnded, meter: ProcessMeter, signals: StopSignals
    ) -> RunSummary:
        if orchestrator.observer:
            orchestrator.observer.write_rest(ended.step)
        await asyncio.to_thread(self._writer.close)
        dropped = self._writer.statistics().dropped + self._writer.statistics().failed
        summary = RunSummary(
            name=self._settings.name,
            status=ended.status,
            reason=ended.reason,
            exit_code=_exit_code(ended, orchestrator, signals),
            model=self._settings.model.name,
            environments=list(self._environments),
            steps=ended.step,
            policy_version=orchestrator.version,
            wall_s=self._clock() - self._began_s,
            started_at=self._started_at,
            checkpoint_path=orchestrator.checkpoint,
            peak_rss_bytes=meter.peak_rss_bytes,
            dropped_records=dropped,
            versions=_versions(),
            **figures(orchestrator.scheduler.ledger, orchestrator.observer)
            if orchestrator.scheduler and orchestrator.observer
            else Figures(),
        )
        try:
            write_summary(self._paths.root, summary)
        except OSError as error:
            _logger.error("the summary could not be written: %s", error.strerror)
        return summary


def _exit_code(ended: TrainerEnded, orchestrator: Orchestrator, signals: StopSignals) -> int:
    if ended.status is RunStatus.FINISHED:
        return ExitCode.FINISHED
    if ended.status is RunStatus.CANCELLED:
        return signals.exit_code or ExitCode.INTERRUPTED
    return exit_code_of(orchestrator.error) if isinstance(orchestrator.error, Exception) else ExitCode.FAILED


def _write_report(paths: RunPaths) -> None:
    try:
        write_report(paths.root)
    except (TailraceError, OSError) as error:
        _logger.warning("the report could not be written: %s", error)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = package_version(package)
    return found
