"""Rewards by functions: what an agent returned, what a function makes of it, or a weighted sum of several.

Coroutines run on the event loop. Synchronous functions run in worker processes, which are killed when a call takes too
long (a checker that holds the interpreter lock for seconds stalls nothing but its own process), unless trusted.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tailrace.environments import EnvironmentSpec, NamedReward
from tailrace.environments.named_rewards import checked_values, weighted_sum
from tailrace.errors import InvalidReward
from tailrace.records import Group, Message, Reward, Rollout, Task
from tailrace.rollouts.scoring.rewards import require_reward, unscore
from tailrace.rollouts.workers.pool import WorkerPool


class Rewards:
    """Scores rollouts as soon as they end, and groups by the named functions that see all their rollouts together."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    async def score(self, rollout: Rollout, spec: EnvironmentSpec, returned: float | Reward | None) -> Reward | None:
        """The reward of a rollout whose agent `returned` this; None only where its group is scored later.

        Raises what a reward function raises, `RolloutTimeout` where its worker had to be killed, and `InvalidReward`.
        """
        what = f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"
        if not spec.scores_rollouts:
            if spec.scores_groups and _is_missing(returned):
                _set_aside(rollout, returned)
                return None
            return _saving(require_reward(returned, what), spec.saved_columns)
        clock = asyncio.get_running_loop().time
        since = clock()
        if spec.rewards:
            alone = {name: reward for name, reward in spec.rewards.items() if not reward.together}
            (value,) = await self._weighted(rollout.task, [rollout.messages], alone, spec) if alone else [None]
        else:
            value = require_reward(await self._called(rollout, spec), what)
        rollout.metrics["score_s"] = clock() - since
        if value is not None:
            return _saving(_merged(require_reward(value, what), returned), spec.saved_columns)
        if spec.scores_groups:
            _set_aside(rollout, returned)
            return None
        raise InvalidReward(f"{what} is missing: none of {', '.join(spec.rewards)} applies to it")

    async def score_together(self, group: Group, spec: EnvironmentSpec) -> None:
        """Add what the functions for whole groups give to the rollouts' rewards. Raises as `score` does."""
        together = {name: reward for name, reward in spec.rewards.items() if reward.together}
        if not together:
            return
        conversations = [rollout.messages for rollout in group.rollouts]
        added = await self._weighted(group.task, conversations, together, spec)
        for rollout, reward in zip(group.rollouts, added, strict=True):
            if reward is not None:
                own = rollout.reward or Reward(0.0)
                components = {**own.components, **reward.components}
                rollout.reward = replace(own, value=own.value + reward.value, components=components)

    async def _called(self, rollout: Rollout, spec: EnvironmentSpec) -> object:
        assert spec.reward is not None
        if spec.trusted or is_async_function(spec.reward):
            scored = spec.reward(rollout.task, rollout.messages)
            return await scored if inspect.isawaitable(scored) else scored
        return await self._workers.reward(rollout.task, rollout.messages)

    async def _weighted(
        self,
        task: Task,
        conversations: Sequence[list[Message]],
        rewards: Mapping[str, NamedReward],
        spec: EnvironmentSpec,
    ) -> list[Reward | None]:
        """One sum per conversation. All functions at once: the asynchronous ones here, the others in a worker."""
        apart = [name for name, reward in rewards.items() if not (spec.trusted or reward.is_async)]
        async with asyncio.TaskGroup() as scoring:
            here = {
                name: scoring.create_task(_returned(reward, task, conversations))
                for name, reward in rewards.items()
                if name not in apart
            }
            there = scoring.create_task(self._workers.named_rewards(task, conversations, apart)) if apart else None
        returned = {name: call.result() for name, call in here.items()} | dict(there.result() if there else {})
        values = {name: checked_values(returned[name], len(conversations), name) for name in rewards}
        return [
            weighted_sum({name: values[name][place] for name in rewards}, rewards)
            for place in range(len(conversations))
        ]


async def _returned(reward: NamedReward, task: Task, conversations: Sequence[list[Message]]) -> object:
    returned = reward.call([task] * len(conversations), conversations)
    return await returned if inspect.isawaitable(returned) else returned


def _is_missing(returned: float | Reward | None) -> bool:
    """Whether there is no value in it: None, or what an environment without a step reward reports beside one."""
    return returned is None or (isinstance(returned, Reward) and math.isnan(returned.value))


def _set_aside(rollout: Rollout, returned: float | Reward | None) -> None:
    """Keep beside the rollout what was reported with a value that does not count."""
    rollout.reward = returned if isinstance(returned, Reward) else None
    unscore(rollout)


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
