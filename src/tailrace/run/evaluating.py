"""`tailrace eval`: the mean reward of a model on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from tailrace.config import RunSettings
from tailrace.output_files import require_writable, writing_to
from tailrace.records import Json, Rollout
from tailrace.reporting.conversations import conversation_lines
from tailrace.reporting.evaluation_figures import EVALUATED
from tailrace.reporting.formats import NOTHING
from tailrace.reporting.rollout_records import RolloutEntry, encode_line, rollout_record
from tailrace.rollouts import LoadedEnvironment
from tailrace.run.engines import require_engine
from tailrace.run.parts import (
    held_out_tasks,
    load_environments,
    require_held_out_tasks,
)
from tailrace.run.playing import Playing, Progress, ReportProgress, playing
from tailrace.scheduling import EvaluationResult, evaluate

_LEAST_SHARE = 0.1
"""Of an environment's rollouts; where fewer came back, it could not be evaluated."""


@dataclass(frozen=True, slots=True)
class EnvironmentEvaluation:
    """One environment's result."""

    environment: str
    result: EvaluationResult
    """Sampled as `rollouts.evaluation` says."""
    greedy: EvaluationResult | None
    wall_s: float

    @property
    def rollouts(self) -> list[Rollout]:
        """Of all that was measured."""
        return self.result.rollouts + (self.greedy.rollouts if self.greedy else [])


async def evaluate_model(
    settings: RunSettings,
    *,
    limit: int | None = None,
    greedy: bool = False,
    given: Mapping[str, object] = MappingProxyType({}),
    report_progress: ReportProgress | None = None,
) -> list[EnvironmentEvaluation]:
    """Run every held-out task of every environment once, or the first `limit` of each, with the generators of `train`.

    `greedy` runs every task once more, by greedy decoding; `given` are environments that only this process has;
    `report_progress` is called with a line for people. Raises `DataError` when no environment has held-out tasks, and
    as `playing` does.
    """
    require_engine(settings.generator)
    environments = await asyncio.to_thread(load_environments, settings, given)
    require_held_out_tasks(environments)
    async with playing(settings, environments, "eval", report_progress) as play:
        measured = [loaded for loaded in environments.values() if len(loaded.spec.eval_tasks)]
        return [await _evaluate_one(play, one, limit, greedy) for one in measured]


async def _evaluate_one(
    play: Playing, environment: LoadedEnvironment, limit: int | None, greedy: bool
) -> EnvironmentEvaluation:
    ways = (False, True) if greedy else (False,)
    num_tasks = len(environment.spec.eval_tasks)
    progress = Progress(environment.spec.name, min(num_tasks, limit or num_tasks) * len(ways))
    return await play.within(_measure(play, environment, limit, ways, progress), progress)


async def _measure(
    play: Playing, environment: LoadedEnvironment, limit: int | None, ways: tuple[bool, ...], progress: Progress
) -> EnvironmentEvaluation:
    settings, clock = play.settings, asyncio.get_running_loop().time
    name, began_s = environment.spec.name, clock()
    found = []
    for is_greedy in ways:
        runner = play.rollouter.runner(evaluation_seed=settings.seed, greedy=is_greedy)
        tasks = held_out_tasks(environment, settings.seed, limit)
        results = await evaluate(
            tasks, runner, settings.scheduling, concurrency=settings.max_running, on_ended=progress.one_ended
        )
        found.append(results[name])
    return EnvironmentEvaluation(name, found[0], found[1] if len(found) > 1 else None, clock() - began_s)


def require_savable(path: Path | None, setting: str) -> None:
    """Raise `SettingsError` where `save_rollouts` could not write there; `setting` says where the path is from."""
    if path is not None:
        require_writable(path, setting, makes_folders=True)


def save_rollouts(evaluations: list[EnvironmentEvaluation], path: Path, setting: str) -> None:
    """Append the rollouts, readable, to that file. Raises `DataError`, which names `setting`."""
    with writing_to(path, setting):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            for evaluation in evaluations:
                for rollout in evaluation.rollouts:
                    file.write(encode_line(rollout_record(RolloutEntry(rollout, EVALUATED), step=0)))


def evaluation_text(model: str, evaluations: list[EnvironmentEvaluation]) -> str:
    """One line per environment, for people."""
    return "\n".join(_line(model, evaluation) for evaluation in evaluations)


def unevaluated(evaluations: list[EnvironmentEvaluation]) -> list[str]:
    """A sentence for each environment of which no rollout came back, or hardly any: its figures say nothing."""
    return [sentence for one in evaluations if (sentence := _unevaluated(one))]


def _unevaluated(evaluation: EnvironmentEvaluation) -> str:
    for result in filter(None, (evaluation.result, evaluation.greedy)):
        came_back, lost = len(result.rollouts), result.num_lost
        if came_back < _LEAST_SHARE * (came_back + lost):
            return (
                f"environment {evaluation.environment!r} could not be evaluated: {lost} of {came_back + lost} rollouts "
                f"were lost; the newest failure: {result.failure}"
            )
    return ""


def _line(model: str, evaluation: EnvironmentEvaluation) -> str:
    result = evaluation.result
    means = _mean(result) if evaluation.greedy is None else f"{_mean(result)} (greedy {_mean(evaluation.greedy)})"
    lost = "".join(f", {count} lost ({reason})" for reason, count in sorted(result.failed.items()))
    return (
        f"{evaluation.environment}: mean reward {means} over {len(result.rewards)} held-out tasks{lost}, {model}, "
        f"{evaluation.wall_s:.1f} s"
    )


def _mean(result: EvaluationResult) -> str:
    """Without what too few rewards do not tell."""
    error = f" ± {result.standard_error:.3f}" if len(result.rewards) > 1 else ""
    return f"{result.mean_reward:.3f}{error}" if result.rewards else NOTHING


def evaluation_samples(evaluations: list[EnvironmentEvaluation], count: int) -> str:
    """The sampled conversations of the first `count` tasks of every environment."""
    shown = [rollout for evaluation in evaluations for rollout in evaluation.result.rollouts[:count]]
    return "\n\n".join("\n".join(conversation_lines(rollout)) for rollout in shown)


def evaluation_json(evaluations: list[EnvironmentEvaluation]) -> str:
    """One JSON object by environment, for programs."""
    return msgspec.json.encode({one.environment: _figures(one) for one in evaluations}).decode()


def _figures(evaluation: EnvironmentEvaluation) -> dict[str, Json]:
    result, greedy = evaluation.result, evaluation.greedy
    return {
        "reward_mean": result.mean_reward,
        "standard_error": result.standard_error,
        "tasks": len(result.rewards),
        "failed": dict(result.failed),
        **({} if greedy is None else {"greedy_reward_mean": greedy.mean_reward, "greedy_failed": dict(greedy.failed)}),
        "wall_s": evaluation.wall_s,
    }
