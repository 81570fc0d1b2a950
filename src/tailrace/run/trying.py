"""`tailrace try`: a few rollouts of an environment without training, and what is wrong with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tailrace.config import RunSettings, list_recipes, load_settings, read_settings_file
from tailrace.config.overrides import as_toml
from tailrace.config.sources import Table
from tailrace.errors import RequestRefused, RolloutError
from tailrace.records import Group, GroupId, Rollout, RolloutId, Task
from tailrace.reporting.trials import Failure, Trial, TriedGroup, trial_text
from tailrace.rollouts import LoadedEnvironment, Rollouter
from tailrace.run.engines import require_engine
from tailrace.run.parts import load_environments
from tailrace.run.playing import Playing, Progress, ReportProgress, playing
from tailrace.scheduling import TaskSource, TaskStream
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.phases import PhaseRecorder

_STALL_S = 0.25
"""The event loop held for so long is told: a run with dozens of rollouts in flight feels it."""
_USERS_PHASES = ("environment", "score", "score_group")


def settings_to_try(environment: str, recipe: str, overrides: Sequence[str]) -> tuple[RunSettings, str, list[str]]:
    """The settings that `tailrace train` would take, the recipe they come from, and the overrides.

    `environment` is one's name, for the model and limits of `recipe`; or a recipe or TOML file, for all of its own. Of
    a recipe with several environments the one of that id or name is tried as it is there.
    """
    if environment.endswith(".toml") or environment in list_recipes():
        recipe, chosen = environment, list(overrides)
    else:
        chosen = [*_in_place_of_its_own(environment, read_settings_file(recipe).table), *overrides]
    return load_settings(recipe, chosen), recipe, chosen


def _in_place_of_its_own(environment: str, recipe: Table) -> list[str]:
    """Overrides that leave a recipe with the environment of this name."""
    entries = recipe.get("environments")
    if not isinstance(entries, list) or len(entries) < 2:
        return ["--environment.name", environment]
    for key in ("id", "name"):
        if own := [entry for entry in entries if isinstance(entry, dict) and entry.get(key) == environment]:
            return ["--environments", as_toml(own)]
    return ["--environments", as_toml([{"name": environment}])]


async def try_environments(
    settings: RunSettings,
    *,
    tasks: int,
    group_size: int,
    tokens: bool = False,
    report_progress: ReportProgress | None = None,
) -> list[tuple[Trial, str]]:
    """Every environment of the settings: `tasks` groups of `group_size` rollouts each, and the text for the terminal.

    The tasks are the first that a run with these settings draws, its sampling that of training;
    `report_progress` is called with a line for people. Raises `SettingsError`, `DataError` or `ModelError` for what a
    run would be refused for, and what all generators failed with.
    """
    require_engine(settings.generator)
    if settings.rollouts.agent_workers == "auto":  # what holds the loop is told, and a debugger stops in an agent
        settings = settings.model_copy(update={"rollouts": settings.rollouts.model_copy(update={"agent_workers": 0})})
    environments = await asyncio.to_thread(load_environments, settings)
    async with playing(settings, environments, "try", report_progress) as play:
        trials = [await _try(play, loaded, tasks, group_size) for loaded in environments.values()]
    return [(trial, trial_text(trial, play.renderer.tokenizer.decode, tokens=tokens)) for trial in trials]


async def _try(play: Playing, environment: LoadedEnvironment, tasks: int, group_size: int) -> Trial:
    settings = play.settings
    drawn = TaskStream([TaskSource(environment.spec)], seed=settings.seed, max_epochs=1)
    keys = [key for key in (drawn.draw() for _ in range(tasks)) if key is not None]
    groups = [TriedGroup(await drawn.make(key)) for key in keys]
    stalls = _Stalls()
    progress = Progress(environment.spec.name, len(groups) * group_size)
    with stalls, PhaseRecorder().recording() as phases:
        async with LoopLagMonitor(_STALL_S / 5, stall_s=_STALL_S, phases=phases) as lag:
            await play.within(_play_all(groups, play.rollouter, group_size, progress), progress)
    return Trial(environment, groups, lag.snapshot(), stalls.messages, settings.max_model_tokens)


async def _play_all(groups: list[TriedGroup], rollouter: Rollouter, group_size: int, progress: Progress) -> None:
    async with asyncio.TaskGroup() as running:
        for number, group in enumerate(groups):
            group_id = GroupId(f"try/{group.task.task_id}#{number}")
            running.create_task(_play(group, group_id, rollouter, group_size, progress))


async def _play(
    tried: TriedGroup, group_id: GroupId, rollouter: Rollouter, group_size: int, progress: Progress
) -> None:
    """Play and score one group; what fails is kept."""
    lost: dict[RolloutId, Rollout] = {}
    runner = rollouter.runner(on_lost=lambda rollout: lost.update({rollout.rollout_id: rollout}))

    async def attempt(rollout_id: RolloutId, task: Task) -> None:
        try:
            tried.finished.append(await runner.run(task, group_id=group_id, rollout_id=rollout_id))
        except (RolloutError, RequestRefused) as error:
            tried.failures.append(Failure(error.reason, str(error), lost.get(rollout_id)))
        progress.one_ended()

    async with asyncio.TaskGroup() as attempts:
        for number in range(group_size):
            attempts.create_task(attempt(RolloutId(f"{group_id}.{number}"), tried.task))
    try:
        tried.scored = await runner.score(Group(group_id, tried.task, list(tried.finished)))
    except RolloutError as error:
        tried.failures.append(Failure(error.reason, str(error)))


class _Stalls(logging.Handler):
    """Keeps what is logged of an event loop that is held, in place of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._logger = logging.getLogger("tailrace.tracing.lag")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the stacks in which users' code held it."""
        message = record.getMessage()
        if "\n" in message and any(f"in phase {phase!r}" in message for phase in _USERS_PHASES):
            self.messages.append(message)

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.propagate = False

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
