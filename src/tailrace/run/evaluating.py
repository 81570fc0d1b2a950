"""`tailrace eval`: the mean reward of a model on held-out tasks."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.config import RunSettings
from tailrace.lifecycle.event_loop import first_done
from tailrace.reporting.evaluation_figures import EVALUATED
from tailrace.reporting.rollout_records import RolloutEntry, encode_line, rollout_record
from tailrace.rollouts import LoadedEnvironment, Rollouter
from tailrace.run.engines import require_engine
from tailrace.run.parts import (
    held_out_tasks,
    load_environments,
    make_renderer,
    make_rollouter,
    require_held_out_tasks,
)
from tailrace.run.started_roles import open_generate
from tailrace.scheduling import EvaluationResult, evaluate


@dataclass(frozen=True, slots=True)
class EnvironmentEvaluation:
    """One environment's result."""

    environment: str
    result: EvaluationResult
    wall_s: float


async def evaluate_model(
    settings: RunSettings, *, save: Path | None = None, limit: int | None = None
) -> list[EnvironmentEvaluation]:
    """Run every held-out task of every environment once, or the first `limit` of each, with the generators of `train`.

    `save` appends readable rollouts to that file. Raises `DataError` when no environment has held-out tasks, and what
    all generators failed with.
    """
    require_engine(settings.generator)
    environments = await asyncio.to_thread(load_environments, settings)
    require_held_out_tasks(environments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-eval-")))
        renderer = await asyncio.to_thread(make_renderer, settings, folder)
        async with (
            open_generate(settings, folder) as (generate, failed),
            make_rollouter(settings, environments, renderer=renderer, generate=generate) as rollouter,
        ):
            runner = rollouter.runner(evaluation_seed=settings.seed)
            measured = [loaded for loaded in environments.values() if len(loaded.spec.eval_tasks)]
            try:  # all rollouts meet the failure of their generators: it is raised once
                found = [await first_done(failed(), _evaluate_one(settings, one, runner, limit)) for one in measured]
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
    if save is not None:
        await asyncio.to_thread(_save, found, save)
    return found


async def _evaluate_one(
    settings: RunSettings, environment: LoadedEnvironment, runner: Rollouter, limit: int | None
) -> EnvironmentEvaluation:
    clock = asyncio.get_running_loop().time
    began_s = clock()
    tasks = held_out_tasks(environment, settings.seed, limit)
    results = await evaluate(tasks, runner, concurrency=settings.max_running)
    return EnvironmentEvaluation(environment.spec.name, results[environment.spec.name], clock() - began_s)


def _save(evaluations: list[EnvironmentEvaluation], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for evaluation in evaluations:
            for rollout in evaluation.result.rollouts:
                file.write(encode_line(rollout_record(RolloutEntry(rollout, EVALUATED), step=0)))


def evaluation_text(model: str, evaluations: list[EnvironmentEvaluation]) -> str:
    """One line per environment, for people."""
    return "\n".join(_line(model, evaluation) for evaluation in evaluations)


def _line(model: str, evaluation: EnvironmentEvaluation) -> str:
    result = evaluation.result
    lost = "".join(f", {count} lost ({reason})" for reason, count in sorted(result.failed.items()))
    return (
        f"{evaluation.environment}: mean reward {result.mean_reward:.3f} ± {result.standard_error:.3f} "
        f"over {len(result.rewards)} held-out tasks{lost}, {model}, {evaluation.wall_s:.1f} s"
    )


def evaluation_json(evaluations: list[EnvironmentEvaluation]) -> str:
    """One JSON object by environment, for programs."""
    figures = {
        evaluation.environment: {
            "reward_mean": evaluation.result.mean_reward,
            "standard_error": evaluation.result.standard_error,
            "tasks": len(evaluation.result.rewards),
            "failed": evaluation.result.failed,
            "wall_s": evaluation.wall_s,
        }
        for evaluation in evaluations
    }
    return msgspec.json.encode(figures).decode()
