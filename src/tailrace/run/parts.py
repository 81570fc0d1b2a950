"""Parts that several commands build from a run's settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tailrace.config import RunSettings
from tailrace.config.contradictions.generators import temperatures
from tailrace.environments import EnvironmentSettings, EnvironmentSpec, load_environment
from tailrace.environments.outside import OutsideAgent
from tailrace.environments.registry import is_built_in
from tailrace.errors import DataError, EnvironmentFailed, SettingsError
from tailrace.gateway import Gateway
from tailrace.lifecycle.launchers import launcher_class
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage
from tailrace.models.loading import require_weights, tokenizer_folder
from tailrace.records import Generate, Task
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter
from tailrace.rollouts.agent_workers import WorkerPlace, WorkerWatch
from tailrace.rollouts.agent_workers.messages import pack_task
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring import Teacher
from tailrace.run.folder import RunPaths


def load_environments(
    settings: RunSettings, given: Mapping[str, object] = MappingProxyType({})
) -> dict[str, LoadedEnvironment]:
    """Every environment of the run by its id. Raises `SettingsError` and `DataError`.

    `given` are environments that exist in this process alone, by the names that the settings have for them.
    """
    loaded = dict[str, LoadedEnvironment]()
    for index, chosen in enumerate(settings.environments):
        try:
            spec = load_environment(chosen, given=given.get(chosen.name))
            if spec.check is not None:
                spec.check()
        except SettingsError as error:
            error.key = ("environments", index, *error.key)
            raise
        if spec.name in loaded:
            raise SettingsError(
                f"two environments are called {spec.name!r}, the later one is {chosen.name}: give it an id, "
                f"environments.{index}.id",
                key=("environments", index),
            )
        if chosen.name in given and spec.needs_workers:
            raise SettingsError(
                f"environment {spec.name!r} was given as an object and has synchronous code that is not trusted, which "
                "runs in a worker process, and that cannot import it: write async functions, put it in a module, or "
                "say trusted = True if it returns soon"
            )
        if settings.rollouts.workers == 0 and spec.needs_workers:
            raise SettingsError(
                f"rollouts.workers is 0, but environment {spec.name!r} has synchronous code that is not trusted, which "
                "runs in a worker process: raise it, or write environment.trusted = true if that code returns soon"
            )
        if settings.scheduling.group_release == "early" and spec.scores_groups:
            raise SettingsError(
                f"scheduling.group_release = 'early' needs a reward per rollout, but environment {spec.name!r} scores "
                "whole groups (score_group, a judge, or a reward with together = true): leave "
                "scheduling.group_release out"
            )
        is_apart, stays_because = _is_apart(settings, chosen, spec, is_given=chosen.name in given)
        loaded[spec.name] = LoadedEnvironment.of(
            spec, settings.rollouts, chosen, is_apart=is_apart, stays_because=stays_because
        )
    if found := next(temperatures(with_own_judges(settings, loaded), of_judges=True), None):
        raise SettingsError(found.message, key=found.keys[0])
    return loaded


def with_own_judges(settings: RunSettings, loaded: Mapping[str, LoadedEnvironment]) -> RunSettings:
    """The settings, with judges as they were loaded: what is unset in one is of the judge that the environment has."""
    judged = tuple(
        chosen.model_copy(update={"judge": one.spec.judge})
        for chosen, one in zip(settings.environments, loaded.values(), strict=True)
    )
    return settings.model_copy(update={"environments": judged})


def _is_apart(
    settings: RunSettings, chosen: EnvironmentSettings, spec: EnvironmentSpec, *, is_given: bool
) -> tuple[bool, str]:
    """Whether its rollouts are played in agent workers, and why not where the settings leave that open.

    Raises `SettingsError` where they cannot be and have to.
    """
    workers = settings.rollouts.agent_workers
    if workers == "auto":
        if settings.placement == "inline" or is_built_in(chosen.name) or not spec.runs_on_loop:
            return False, ""
        stays = "it exists in this program alone" if is_given else _why_no_rows(spec)
        return not stays, stays
    if workers and is_given:
        raise SettingsError(
            f"environment {spec.name!r} was given as an object, which rollouts.agent_workers = {workers} processes "
            "cannot import: put it in a module and name it there (module:attribute), or write "
            "rollouts.agent_workers = 0"
        )
    if workers and isinstance(spec.agent, OutsideAgent) and launcher_class(settings.placement).hosts_agents:
        raise SettingsError(
            f"clients outside play environment {spec.name!r} where they find this process, and rollouts.agent_workers ="
            f" {workers} puts agents on the nodes of a cluster: leave it out"
        )
    return workers > 0, ""


def _why_no_rows(spec: EnvironmentSpec) -> str:
    """Why its rows cannot be sent to another process, by the first one; empty where they can."""
    if not len(spec.train_tasks):
        return ""
    try:
        pack_task(spec.train_task(0))
    except EnvironmentFailed as error:
        return str(error)
    return ""


def agent_workers_here(settings: RunSettings, environments: Mapping[str, LoadedEnvironment]) -> int:
    """How many run on this machine."""
    if not any(loaded.is_apart for loaded in environments.values()):
        return 0
    are_hosted = launcher_class(settings.placement).hosts_agents and settings.rollouts.hosted_worker_names
    return 0 if are_hosted else settings.rollouts.num_agent_workers


def describe_places(settings: RunSettings, environments: Mapping[str, LoadedEnvironment]) -> list[str]:
    """Where users' agents run, for people: those in agent workers, those of clients outside, each that has to stay."""
    sentences = []
    count = settings.rollouts.num_agent_workers
    workers = "an agent worker" if count == 1 else f"{count} agent workers"
    apart = {name: loaded.is_outside for name, loaded in environments.items() if loaded.is_apart}
    if agents := [name for name, is_outside in apart.items() if not is_outside]:
        sentences.append(f"Agents of {', '.join(agents)} run in {workers} (rollouts.agent_workers).")
    if outside := [name for name, is_outside in apart.items() if is_outside]:
        sentences.append(f"Clients outside play {', '.join(outside)} with {workers} (rollouts.agent_workers).")
    return sentences + [
        f"Agents of {name} run beside the scheduler, where one that blocks or crashes concerns the whole run: "
        f"{loaded.stays_because}."
        for name, loaded in environments.items()
        if loaded.stays_because
    ]


def require_held_out_tasks(environments: Mapping[str, LoadedEnvironment]) -> None:
    """Raise `DataError` where nothing could be evaluated."""
    if not any(len(loaded.spec.eval_tasks) for loaded in environments.values()):
        raise DataError(
            f"there is no held-out task in {', '.join(environments)}: set environment.eval_tasks or "
            "environment.eval_data"
        )


def held_out_tasks(environment: LoadedEnvironment, seed: int, limit: int | None = None) -> Iterator[Task]:
    """Held-out tasks of one environment, the first so many: the same ones every time. Making one may take a while."""
    count = len(environment.spec.eval_tasks)
    seeds = np.random.default_rng(seed).integers(2**31, size=min(count, limit or count))
    for index, own in enumerate(seeds.tolist()):
        yield environment.spec.eval_task(index, seed=own)


def make_renderer(settings: RunSettings, tokenizer_files: Path) -> ChatRenderer:
    """The model's chat renderer; `tokenizer_files` takes the tokenizer of a model without a local folder.

    Raises `ModelError` for a model that cannot be trained, as far as can be seen without loading it.
    """
    folder = tokenizer_folder(settings.model.name, tokenizer_files)
    renderer = ChatRenderer(folder, name=settings.model.name, thinking_retention=settings.rollouts.thinking_retention)
    require_weights(settings.model.name)
    return renderer


def within_own_context(settings: RunSettings, renderer: ChatRenderer) -> RunSettings:
    """The settings, with the model's own context where they name none. Raises `SettingsError` where they exceed it."""
    own, model = renderer.tokenizer.own_context, settings.model
    if own is None or own >= settings.max_model_tokens:
        return settings
    if model.max_model_tokens is not None:
        key = ("model", "max_model_tokens")
        raise SettingsError(
            f"model.max_model_tokens is {model.max_model_tokens}, but {model.name} was made for {own} (config.json): "
            "lower it, or leave it out",
            key=key,
        )
    return settings.model_copy(update={"model": model.model_copy(update={"max_model_tokens": own})})


@asynccontextmanager
async def open_rollouter(
    settings: RunSettings,
    environments: Mapping[str, LoadedEnvironment],
    *,
    renderer: ChatRenderer,
    generate: Generate,
    teacher: Teacher | None = None,
    paths: RunPaths | None = None,
    gateway: Gateway | None = None,
    agent_places: Sequence[WorkerPlace] | None = None,
) -> AsyncIterator[Rollouter]:
    """The rollouter over all environments. `paths` and `gateway`, which it closes, are a run's, where there is one.

    On leaving, it is closed within `shutdown.cancel_rollouts_s`; what is left of its processes then is killed.
    """
    watched = settings.observability
    rollouter = Rollouter(
        settings.rollouts,
        environments,
        renderer=renderer,
        generate=generate,
        facts=RunFacts(
            max_model_tokens=settings.max_model_tokens,
            row_tokens=settings.scheduling.row_tokens if settings.trainer.feed == "batch" else None,
            max_steps=settings.max_steps or 0,
            records_experts=settings.generator.return_routed_experts,
            takes_demonstrations=settings.trainer.loss.cross_entropy is not None,
        ),
        endpoints=gateway or Gateway(settings.gateway, model=settings.model.name, from_start=False),
        teacher=teacher,
        worker_log=None if paths is None else paths.logs / "workers.log",
        watch=WorkerWatch(
            log=None if paths is None else paths.logs / "agent_workers.log",
            trace_folder=None if paths is None or not watched.trace_mb else paths.trace_parts,
            trace_bytes=int(watched.trace_mb * 1e6),
            lag_interval_s=watched.lag_interval_s,
            stall_s=watched.stall_s,
        ),
        agent_places=agent_places,
    )
    try:
        yield rollouter
    finally:
        try:
            await run_stage(ShutdownStage.CANCEL_ROLLOUTS, settings.shutdown, rollouter.close)
        finally:
            rollouter.kill()
