"""Measure a policy: each task a fixed number of times, nothing trained."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tailrace.errors import RequestRefused, RolloutError
from tailrace.records import Group, GroupId, Rollout, RolloutId, Task
from tailrace.scheduling.stream import GroupRunner


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationResult:
    """Scored rollouts in task order, and how many were lost, by reason."""

    rollouts: list[Rollout]
    failed: dict[str, int]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were scored."""
        return [rollout.reward.value for rollout in self.rollouts if rollout.reward is not None]

    @property
    def mean_reward(self) -> float:
        """Mean reward; a lost rollout is left out, never counted as 0. NaN when all were lost."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean reward; NaN below two rollouts."""
        if len(self.rewards) < 2:
            return math.nan
        mean = self.mean_reward
        variance = math.fsum((reward - mean) ** 2 for reward in self.rewards) / (len(self.rewards) - 1)
        return math.sqrt(variance / len(self.rewards))


async def evaluate(
    tasks: Iterable[Task],
    runner: GroupRunner,
    *,
    concurrency: int,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
) -> EvaluationResult:
    """Run every task once, at most `concurrency` at a time."""
    finished: dict[int, Rollout] = {}
    failed: Counter[str] = Counter()
    numbered = enumerate(tasks)

    async def work(queue: Iterator[tuple[int, Task]]) -> None:
        for number, task in queue:
            try:
                finished[number] = await _run_one(task, number, runner)
                on_rollout(finished[number])
            except RolloutError as error:
                failed[error.reason] += 1
            except RequestRefused:
                failed["request_refused"] += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work(numbered))
    return EvaluationResult([finished[number] for number in sorted(finished)], dict(failed))


async def _run_one(task: Task, number: int, runner: GroupRunner) -> Rollout:
    group_id = GroupId(f"eval/{task.task_id}#{number}")
    rollout = await runner.run(task, group_id=group_id, rollout_id=RolloutId(f"{group_id}.0"), attempt=0)
    await runner.score(Group(group_id=group_id, task=task, rollouts=[rollout]))
    return rollout
