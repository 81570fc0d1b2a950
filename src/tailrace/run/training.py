"""`tailrace train`: from settings to a trained model, a summary and a report.

settings ─► environments ─► folder ─► the run's parts (`composition`) ─► terminal record ─► summary ─► report
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import msgspec

from tailrace.cancelling import cancelled
from tailrace.config import RUNS, RunSettings, SettingsFile, plan_run, with_decay_end, with_scaled_deadlines
from tailrace.config.shutdown import HURRIED_WRITES_S
from tailrace.errors import TailraceError
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_named, exit_code_of
from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.lifecycle.launchers import launcher_class
from tailrace.lifecycle.memory import reserve_memory, share_one_arena
from tailrace.lifecycle.signals import StopSignals
from tailrace.models.files import read_json
from tailrace.records import RunStatus, TrainerEnded
from tailrace.reporting.live import LiveView, wants_live_view
from tailrace.reporting.logs import Terminal, setup_logging
from tailrace.reporting.observer import with_figures
from tailrace.reporting.report import write_report
from tailrace.reporting.summary import RunSummary, summed_up_s, write_summary
from tailrace.reporting.tokens import require_parquet
from tailrace.reporting.totals import read_totals
from tailrace.reporting.trackers.hub import open_trackers
from tailrace.reporting.trackers.registry import require_trackers
from tailrace.rollouts import LoadedEnvironment
from tailrace.run.callbacks import Callbacks
from tailrace.run.composition import ComposedRun, RunGround, compose
from tailrace.run.devices import describe_devices, has_trainer_elsewhere, role_devices
from tailrace.run.engines import require_engine
from tailrace.run.folder import RunPaths, count_starts, open_run_folder, record_settings, writing
from tailrace.run.limits import require_room
from tailrace.run.model_checks import require_frozen_models, require_known_files, require_plain_weights
from tailrace.run.notices import wait_for_notice
from tailrace.run.outside import require_gateway
from tailrace.run.outside_trainer import require_own_process
from tailrace.run.ownership import OWNER_FILE, Ownership, wait_for_owner_elsewhere
from tailrace.run.page import page_beside, require_page, views_of_report
from tailrace.run.parts import (
    describe_places,
    load_environments,
    make_renderer,
    require_held_out_tasks,
    within_own_context,
)
from tailrace.run.phases import ORCHESTRATOR, observed_process, traced_run
from tailrace.run.replica_sources import connect_keys
from tailrace.run.teacher import require_endpoint
from tailrace.run.trainer_lives import describe_lives
from tailrace.run.watchdog import end_when_still
from tailrace.training.settings.lora import require_peft
from tailrace.training.settings.trainer import require_export

_logger = logging.getLogger(__name__)

_STOPPED_BY = {
    ExitCode.INTERRUPTED: ("interrupted", "Ctrl-C again"),
    ExitCode.TERMINATED: ("terminated", "SIGTERM again"),
    ExitCode.HUNG_UP: ("hung up", "SIGTERM"),
    ExitCode.PREEMPTED: ("preempted", "SIGTERM"),
}
"""Why a signal's exit status stops the run, and how it ends at once."""
_HURRIED = (ExitCode.TERMINATED, ExitCode.PREEMPTED)
"""Who sends these ends everything soon after."""

_DROPPED = "sinks/dropped_records"
_LARGEST_WRITE_S = 60.0
"""At the end of a run: a disk that has not finished a file by then, of a large batch's tokens perhaps, hangs."""
_PACKAGES = ("tailrace", "torch", "transformers", "numpy")


def exit_at_once(code: ExitCode) -> NoReturn:
    """Without waiting for anything: for a command that was interrupted twice."""
    os._exit(code)


async def train(
    settings: RunSettings,
    parent: Path = RUNS,
    *,
    recipe: SettingsFile | None = None,
    given: Mapping[str, object] = MappingProxyType({}),
    callbacks: Callbacks | None = None,
    abort: Callable[[ExitCode], NoReturn] = exit_at_once,
    resume_with: str = "the same settings and resume = true",
) -> RunSummary:
    """Train, and leave a run's folder under `parent`.

    `recipe` is what the settings were made of, before anything was laid over it: by it a resume tells what was edited
    since. `given` are environments that only this process has, `abort` is called for a second signal to stop, and once
    the folder is another run's. Who stops the run is told that `resume_with` goes on with it.

    Raises `TailraceError` before anything is started, and at the end what one of `callbacks` raised.
    """
    callbacks = callbacks or Callbacks()
    require_own_process(settings)
    if not launcher_class(settings.placement).runs_in_this_process:  # a trainer in it configures its own allocator
        share_one_arena()
    devices = await asyncio.to_thread(role_devices, settings)
    environments = await asyncio.to_thread(checked_environments, settings, given)
    await asyncio.to_thread(require_known_files, settings)
    await wait_for_owner_elsewhere(parent / settings.name)
    with open_run_folder(settings, parent) as paths, contextlib.ExitStack() as until_written:
        summary = await _train_in(
            *(paths, settings, recipe, environments, devices),
            callbacks=callbacks,
            abort=abort,
            resume_with=resume_with,
            until_written=until_written,
        )
        summary = await asyncio.to_thread(_written, summary, paths, with_report=settings.observability.report)
    if callbacks.error is not None:
        raise callbacks.error
    return summary


async def _train_in(
    paths: RunPaths,
    settings: RunSettings,
    recipe: SettingsFile | None,
    environments: dict[str, LoadedEnvironment],
    devices: Mapping[str, tuple[str, ...]],
    *,
    callbacks: Callbacks,
    abort: Callable[[ExitCode], NoReturn],
    resume_with: str,
    until_written: contextlib.ExitStack,
) -> RunSummary:
    """Train in a folder that is this run's alone. `until_written` holds what hears signals once roles are there."""
    renderer = await asyncio.to_thread(make_renderer, settings, paths.tokenizer)
    require_plain_weights(settings, read_json(renderer.tokenizer.folder / "config.json"))
    given, settings = settings, with_scaled_deadlines(within_own_context(settings, renderer))
    tasks = [len(loaded.spec.train_tasks) for loaded in environments.values()]
    await asyncio.to_thread(partial(require_room, settings, tasks=tasks))
    await asyncio.to_thread(require_frozen_models, settings)
    await require_endpoint(settings, renderer)
    plan = plan_run(settings, {name: len(loaded.spec.train_tasks) for name, loaded in environments.items()})
    settings = with_decay_end(settings, plan)
    changed = record_settings(given, paths, recipe)
    observability = settings.observability
    terminal = Terminal.LIVE if wants_live_view(observability.live) else Terminal.LINES
    with writing(paths.root):
        recent = setup_logging("orchestrator", paths.logs, terminal, level=observability.log_level)
    sentences = [*plan.sentences, *describe_devices(devices), *describe_places(settings, environments)]
    for sentence in [*sentences, *describe_lives(settings), *(f"Goes on with {one}." for one in changed)]:
        _logger.info(sentence)
    async with _summed_up_where_it_fails(settings, paths), contextlib.AsyncExitStack() as stack:
        if not launcher_class(settings.placement).runs_in_this_process:  # tensors in cycles live elsewhere
            stack.enter_context(hold_old_objects(plan.max_running))
            reserve_memory(plan.max_running)
        await stack.enter_async_context(traced_run(paths, observability))
        phases, lag = await stack.enter_async_context(observed_process(ORCHESTRATOR, paths, observability))
        trackers = await stack.enter_async_context(
            open_trackers(
                observability,
                name=settings.name,
                run_folder=paths.root,
                settings=settings.model_dump(mode="json"),
                is_resumed=settings.resume,
            )
        )
        ground = RunGround(settings, paths, environments, renderer, phases, lag, callbacks, trackers)
        live = LiveView(
            ground.view,
            terminal=terminal is Terminal.LIVE,
            recent=recent,
            log_every_s=observability.log_every_s,
            no_progress_s=observability.no_progress_s,
        )
        await stack.enter_async_context(live)
        await stack.enter_async_context(page_beside(observability.ui, paths.root, paths.logs / "dashboard.log"))
        async with compose(ground) as run:
            live.follow(run.view)
            signals = until_written.enter_context(_stop_signals(run, live, abort, resume_with))
            async with (
                callbacks.delivered(run.orchestrator.request_stop),
                _watched(run, signals, partial(_end_without_folder, run, live, abort)),
            ):
                ended = await run.orchestrator.run()
                exit_code = _exit_code(ended, run.orchestrator.error, signals)
        if signals.exit_code in _HURRIED:  # however the run ended then
            run.writers.hurry(HURRIED_WRITES_S)
        summary = await _sum_up(run, ended, exit_code)
        trackers.summarise(summary)
        return summary


def checked_environments(settings: RunSettings, given: Mapping[str, object]) -> dict[str, LoadedEnvironment]:
    """Those of the settings. Raises before anything is started where an engine, keys, an extra or tasks are missing."""
    require_engine(settings.generator)
    connect_keys(settings.generator)  # which every connection reads anew
    if not has_trainer_elsewhere(settings):
        require_peft(settings.trainer.lora)
        require_export(settings.trainer.export_tokens)
    require_parquet(settings.observability.tokens_every_steps)
    require_page(settings.observability.ui)
    require_gateway(bool(settings.gateway.port), "gateway.port", ("gateway", "port"))
    require_trackers(settings.observability.trackers)
    environments = load_environments(settings, given)
    for name, loaded in environments.items():
        require_gateway(loaded.is_outside, f"environment {name!r}, which clients outside play,")
    if settings.evaluation.every_steps is not None:
        require_held_out_tasks(environments)
    return environments


def _stop_signals(
    run: ComposedRun, live: LiveView, abort: Callable[[ExitCode], NoReturn], resume_with: str
) -> StopSignals:
    """Once: an orderly stop, unless the run has ended by itself. Twice: everything at once."""
    requests: set[asyncio.Task[None]] = set()
    paths = run.ground.paths

    def request_stop(code: ExitCode) -> None:
        why, at_once = _STOPPED_BY[code]
        if run.orchestrator.is_done:
            if code in _HURRIED:
                run.writers.hurry(HURRIED_WRITES_S)
            _logger.warning("the run has ended, and the rest of its files is written: %s to stop at once", at_once)
            return
        _logger.warning("stopping, with a last save: %s to stop at once", at_once)
        _logger.warning("afterwards: %s (from %s)", resume_with, paths.checkpoints)
        stop = run.orchestrator.request_stop(RunStatus.CANCELLED, why, hurried=code in _HURRIED)
        requests.add(asyncio.ensure_future(stop))

    def end_at_once(code: ExitCode) -> None:
        run.kill()
        live.abandon_terminal()
        _tell_at_once(paths, resume_with)
        abort(code)

    return StopSignals(request_stop, end_at_once)


def _tell_at_once(paths: RunPaths, resume_with: str) -> None:
    """How to go on, if there is a checkpoint: past the log, whose locks may be held when a signal's handler runs."""
    with contextlib.suppress(OSError):
        if checkpoint := paths.newest_checkpoint():
            os.write(2, f"stopped at once; go on from {checkpoint} with {resume_with}\n".encode())


@contextlib.asynccontextmanager
async def _watched(
    run: ComposedRun, signals: StopSignals, end_without_folder: Callable[[], None]
) -> AsyncIterator[None]:
    """While the run goes on: what ends it where no part of it does."""
    ground = run.ground
    watches = [
        asyncio.create_task(end_when_still(run, ground.settings.observability.watchdog_s), name="watchdog"),
        asyncio.create_task(
            wait_for_notice(ground.paths.root, lambda: signals.ask(ExitCode.PREEMPTED)), name="notice of preemption"
        ),
    ]
    if ground.paths.owned is not None:
        losing = _until_lost(ground.paths.owned, end_without_folder)
        watches.append(asyncio.create_task(losing, name="loss of the run's folder"))
    try:
        yield
    finally:
        await cancelled(*watches)


async def _until_lost(owned: Ownership, end: Callable[[], None]) -> None:
    """Waits for the folder to be another owner's."""
    await asyncio.shield(asyncio.wrap_future(owned.lost))
    end()


def _end_without_folder(run: ComposedRun, live: LiveView, abort: Callable[[ExitCode], NoReturn]) -> None:
    """The folder is another's: whatever is written there from now on, a last save and a summary too, would mix both."""
    _logger.error(
        "another run, which took this one for gone, has its folder %s, or somebody removed %s there: this run ends at "
        "once, with no save",
        run.ground.paths.root,
        OWNER_FILE,
    )
    run.kill()
    live.release_terminal()
    abort(ExitCode.FAILED)


async def _sum_up(run: ComposedRun, ended: TrainerEnded, exit_code: int) -> RunSummary:
    """The run in figures, once everything else is written, or is waited for no longer."""
    run.observer.write_rest(max(ended.step, run.orchestrator.step))
    await run.writers.close(_LARGEST_WRITE_S)
    orchestrator, ground, observer = run.orchestrator, run.ground, run.observer
    steps, version = ended.step, orchestrator.version
    if not orchestrator.has_begun:  # where the trainer went back, and was refused, all that came after stays
        steps, version = max(steps, observer.totals.step), max(version, observer.totals.policy_version)
    summary = RunSummary(
        name=ground.settings.name,
        status=ended.status,
        reason=ended.reason,
        exit_code=exit_code,
        model=ground.settings.model.name,
        environments=list(ground.environments),
        steps=steps,
        policy_version=version,
        starts=observer.starts,
        wall_s=ground.elapsed_s + observer.earlier_wall_s,
        started_at=ground.started_at.isoformat(timespec="seconds"),
        checkpoint_path=orchestrator.checkpoint,
        dropped_records=run.writers.lost_records + observer.counts_before.get(_DROPPED, 0),
        versions=_versions(),
    )
    if not (orchestrator.has_begun or observer.totals.steps):
        return summary
    return with_figures(summary, observer.totals, observer.tally(run.scheduler.ledger))


def _written(summary: RunSummary, paths: RunPaths, *, with_report: bool) -> RunSummary:
    """The summary, written, and the report of it: where either is missing, the run did not succeed."""
    try:
        write_summary(paths.root, summary)
    except OSError as error:
        summary = _incomplete(summary, f"the summary could not be written: {error}")
    if not with_report:
        return summary
    try:
        write_report(paths.root, views_of_report())
    except Exception as error:
        if not isinstance(error, TailraceError | OSError):  # who draws it is not ours
            _logger.exception("the report could not be drawn, by:")
        summary = _incomplete(summary, f"the report could not be written: {error}")
        with contextlib.suppress(OSError):  # the one there says that the run succeeded
            write_summary(paths.root, summary)
    return summary


@contextlib.asynccontextmanager
async def _summed_up_where_it_fails(settings: RunSettings, paths: RunPaths) -> AsyncIterator[None]:
    """A start that cannot be composed, or taken apart, leaves a summary, too."""
    try:
        yield
    except Exception as error:
        await asyncio.to_thread(_write_failed, settings, paths, error)
        raise


def _write_failed(settings: RunSettings, paths: RunPaths, error: Exception) -> None:
    """The summary of a start that failed, with the figures of what the run's folder holds of those before."""
    with contextlib.suppress(TailraceError, OSError):  # the error is what matters
        totals = read_totals(paths.metrics)
        failed = RunSummary(
            name=settings.name,
            status=RunStatus.FAILED,
            reason=str(error),
            exit_code=int(exit_code_of(error)),
            model=settings.model.name,
            environments=[one.id or one.name for one in settings.environments],
            starts=max(1, count_starts(paths)),
            wall_s=max(totals.clock_s, summed_up_s(paths.root)),
            dropped_records=int(totals.counts().get(_DROPPED, 0)),
            checkpoint_path=paths.newest_checkpoint(),
            versions=_versions(),
        )
        if totals.steps:
            failed = with_figures(failed, totals, totals.ledger())
        write_summary(paths.root, failed)


def _incomplete(summary: RunSummary, why: str) -> RunSummary:
    _logger.error(why)
    reason, exit_code = f"{summary.reason}; {why}".removeprefix("; "), summary.exit_code or ExitCode.FAILED
    return msgspec.structs.replace(summary, reason=reason, exit_code=int(exit_code))


def _exit_code(ended: TrainerEnded, error: BaseException | None, signals: StopSignals) -> int:
    if ended.status is RunStatus.FINISHED:
        return ExitCode.FINISHED
    if ended.status is RunStatus.CANCELLED:
        return signals.exit_code or ExitCode.INTERRUPTED
    if ended.error or not isinstance(error, Exception):
        return exit_code_named(ended.error)
    return exit_code_of(error)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = package_version(package)
    return found
