"""Scores captured rollouts again, where their environments score finished conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

from tailrace.config import RunSettings
from tailrace.environments import EnvironmentSpec, load_environment
from tailrace.environments.named_rewards import weighted_sum
from tailrace.environments.results import AgentResult, as_agent_result
from tailrace.records import Group, Rollout
from tailrace.rollouts import ErrorBudget, WorkerPool
from tailrace.rollouts.scoring import RewardFunctions, Scorer

ScoreAgain: TypeAlias = Callable[[Sequence[Group]], Awaitable[None]]
"""Scores every rollout, each in a task of its own."""


def environments_of(settings: RunSettings) -> list[EnvironmentSpec]:
    """A run's. Raises `TailraceError`, also where a capture came here without them."""
    return [load_environment(chosen) for chosen in settings.environments]


@asynccontextmanager
async def rescoring(settings: RunSettings, loaded: Sequence[EnvironmentSpec]) -> AsyncIterator[ScoreAgain | None]:
    """Scores again what the reward functions of a run's environments, `loaded`, score; None where there are none.

    What agents returned stays.
    """
    specs = {spec.name: spec for spec in loaded if spec.scores_rollouts}
    if not specs:
        yield None
        return
    chosen = {spec.name: chosen for spec, chosen in zip(loaded, settings.environments, strict=True)}
    workers = WorkerPool(settings.rollouts, chosen)
    functions, scorer = RewardFunctions(workers), Scorer(errors=ErrorBudget())

    async def score(rollout: Rollout) -> None:
        spec = specs[rollout.task.environment]
        await scorer.score_rollout(
            rollout,
            _reported(rollout, spec),
            lambda rollout, reported: functions.score_rollout(rollout, reported, spec),
            is_group_scored=spec.scores_groups,
        )

    async def score_again(groups: Sequence[Group]) -> None:
        async with asyncio.TaskGroup() as scoring:
            for group in groups:
                for rollout in group.rollouts:
                    if rollout.task.environment in specs:
                        scoring.create_task(score(rollout))

    await workers.start([name for name, spec in specs.items() if spec.needs_workers])
    try:
        yield score_again
    finally:
        await workers.close()


def _reported(rollout: Rollout, spec: EnvironmentSpec) -> AgentResult:
    """What the agent or environment reported before the functions that score again: none of what these had added."""
    captured = as_agent_result(rollout.reward)
    if captured.reward is None or not spec.adds_rewards:
        return captured
    alone = {name: reward for name, reward in spec.rewards.items() if not reward.together}
    added = weighted_sum({name: captured.metrics.get(name) for name in alone}, alone)
    return replace(captured, reward=captured.reward - (added.reward or 0.0))
