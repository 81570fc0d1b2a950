"""Scores captured rollouts again, where their environments score finished conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tailrace.config import RunSettings
from tailrace.environments import EnvironmentSpec, load_environment
from tailrace.environments.results import as_agent_result
from tailrace.errors import TailraceError
from tailrace.records import Group, Rollout
from tailrace.rollouts import ErrorBudget, WorkerPool
from tailrace.rollouts.scoring import RewardFunctions, Scorer


class Rescoring:
    """The reward functions of a run's environments, with the workers that they need. An async context manager.

    What an agent returned as it went cannot be had again, nor what needs a whole group.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._specs: dict[str, EnvironmentSpec] = {}
        self._scorer = Scorer(errors=ErrorBudget())
        self._workers: WorkerPool | None = None

    @property
    def is_possible(self) -> bool:
        """Whether any rollout can be scored again."""
        return bool(self._specs)

    async def __aenter__(self) -> Rescoring:
        try:
            loaded = await asyncio.to_thread(self._load)
        except TailraceError:  # the capture may have come here without its environments
            return self
        self._specs = {spec.name: spec for spec in loaded if spec.scores_rollouts}
        chosen = {spec.name: chosen for spec, chosen in zip(loaded, self._settings.environments, strict=True)}
        self._workers = WorkerPool(self._settings.rollouts, chosen)
        await self._workers.start([name for name, spec in self._specs.items() if spec.needs_workers])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._workers is not None:
            await self._workers.close()

    def _load(self) -> list[EnvironmentSpec]:
        return [load_environment(chosen) for chosen in self._settings.environments]

    async def score(self, groups: Sequence[Group]) -> None:
        """Every rollout at once, each in a task of its own."""
        async with asyncio.TaskGroup() as scoring:
            for group in groups:
                for rollout in group.rollouts:
                    if rollout.task.environment in self._specs:
                        scoring.create_task(self._score(rollout))

    async def _score(self, rollout: Rollout) -> None:
        assert self._workers is not None
        spec = self._specs[rollout.task.environment]
        functions = RewardFunctions(self._workers)
        await self._scorer.score_rollout(
            rollout,
            as_agent_result(rollout.reward),
            lambda rollout, reported: functions.score_rollout(rollout, reported, spec),
            is_group_scored=spec.scores_groups,
        )
