"""A rollout's own reward: what its agent returned, what a function makes of it, or a weighted sum of several.

Coroutines run on the event loop. Synchronous functions run in worker processes, which are killed when a call takes too
long (a checker that holds the interpreter lock for seconds stalls nothing but its own process), unless trusted.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tailrace.environments import EnvironmentSpec, NamedReward
from tailrace.environments.named_rewards import checked_values, weighted_sum
from tailrace.errors import InvalidReward
from tailrace.records import Reward, Rollout
from tailrace.rollouts.scoring import require_reward
from tailrace.rollouts.worker_pool import WorkerPool


class RolloutRewards:
    """Scores single rollouts as soon as they end."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    async def score(self, rollout: Rollout, spec: EnvironmentSpec, returned: float | Reward | None) -> Reward | None:
        """The reward of a rollout whose agent `returned` this; None only where its group is scored later.

        Raises what a reward function raises, `RolloutTimeout` where its worker had to be killed, and `InvalidReward`.
        """
        what = f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"
        if not spec.scores_rollouts:
            if returned is None and spec.scores_groups:
                return None
            return _saving(require_reward(returned, what), spec.saved_columns)
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        value = await (self._weighted(rollout, spec) if spec.rewards else self._called(rollout, spec))
        rollout.metrics["score_s"] = clock.time() - started_s
        if value is None and spec.rewards:
            if spec.scores_groups:
                return None
            raise InvalidReward(f"{what} is missing: none of {', '.join(spec.rewards)} applies to it")
        return _saving(_merged(require_reward(value, what), returned), spec.saved_columns)

    async def _called(self, rollout: Rollout, spec: EnvironmentSpec) -> object:
        assert spec.reward is not None
        if spec.trusted or is_async_function(spec.reward):
            scored = spec.reward(rollout.task, rollout.messages)
            return await scored if inspect.isawaitable(scored) else scored
        return await self._workers.reward(rollout.task, rollout.messages)

    async def _weighted(self, rollout: Rollout, spec: EnvironmentSpec) -> Reward | None:
        """All functions at once: the asynchronous ones here, the others together in one call of a worker."""
        apart = {name: reward for name, reward in spec.rewards.items() if not (spec.trusted or reward.is_async)}
        async with asyncio.TaskGroup() as scoring:
            calls = [
                scoring.create_task(_value(name, reward, rollout))
                for name, reward in spec.rewards.items()
                if name not in apart
            ]
            if apart:
                calls.append(scoring.create_task(self._values_apart(list(apart), rollout)))
        values = {name: value for call in calls for name, value in call.result().items()}
        return weighted_sum({name: values[name] for name in spec.rewards}, spec.rewards)

    async def _values_apart(self, names: Sequence[str], rollout: Rollout) -> Mapping[str, float | None]:
        returned = await self._workers.named_rewards(rollout.task, rollout.messages, names)
        return {name: checked_values(returned[name], 1, name)[0] for name in names}


async def _value(name: str, reward: NamedReward, rollout: Rollout) -> Mapping[str, float | None]:
    returned = reward.call([rollout.task], [rollout.messages])
    values = await returned if inspect.isawaitable(returned) else returned
    return {name: checked_values(values, 1, name)[0]}


def _saving(reward: Reward, saved_columns: Sequence[str] | None) -> Reward:
    """The reward with these columns alone, or with all of them."""
    if saved_columns is None:
        return reward
    return replace(reward, columns={name: reward.columns[name] for name in saved_columns if name in reward.columns})


def _merged(reward: Reward, returned: float | Reward | None) -> Reward:
    """The reward function's value, with what the environment reported beside its own."""
    if not isinstance(returned, Reward):
        return reward
    return Reward(
        reward.value,
        components={**returned.components, **reward.components},
        columns={**returned.columns, **reward.columns},
    )


def is_async_environment(factory: object) -> bool:
    """Whether both methods are coroutines, as far as the class tells without making an environment."""
    made = getattr(factory, "func", factory)  # of a functools.partial
    return all(inspect.iscoroutinefunction(getattr(made, method, None)) for method in ("reset", "step"))


def is_async_function(function: object) -> bool:
    """Whether calling it gives a coroutine; an object with an async `__call__` counts."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
