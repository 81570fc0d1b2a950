"""The environment, modelled: tasks without content, an agent that only takes time, rewards that are drawn."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from tailrace.environments import EnvironmentSpec, Policy
from tailrace.records import Group, Message, RolloutId, Task
from tailrace.rollouts import RolloutPolicy
from tailrace.simulation.draws import standard_normal, uniform
from tailrace.simulation.settings import LoadSettings

ENVIRONMENT = "modelled"

_PASS_SPREAD = 1.5
"""Standard deviation, over tasks, of the logit of passing."""


class Disturbance(Protocol):
    """What may go wrong in an environment."""

    async def playing(self, rollout_id: RolloutId) -> None:
        """Between an agent's last turn and its reward; may raise, or never return."""

    async def scoring(self, group: Group) -> Group | list[Group] | None:
        """As an environment's `score_group`."""


def modelled_environment(
    load: LoadSettings, *, seed: int, tasks: int, disturbance: Disturbance | None = None
) -> EnvironmentSpec:
    """An environment that behaves as the load says. Rewards are drawn by rollout id."""

    async def agent(task: Task, policy: Policy) -> float:
        assert isinstance(policy, RolloutPolicy)
        rollout_id = policy.rollout_id
        messages: list[Message] = []
        for turn in range(load.turns):
            messages.append({"role": "user", "content": ""})
            messages.append((await policy.chat(messages)).message)
            if load.environment_s:
                share = uniform(seed, "environment", rollout_id, turn)
                await asyncio.sleep(-load.environment_s * math.log(share))
        if disturbance is not None:
            await disturbance.playing(rollout_id)
        return _reward(load, seed, task, rollout_id)

    return EnvironmentSpec(
        name=ENVIRONMENT,
        agent=agent,
        train_tasks=[{}] * tasks,
        score_group=disturbance.scoring if disturbance is not None else None,
    )


def _reward(load: LoadSettings, seed: int, task: Task, rollout_id: RolloutId) -> float:
    if load.pass_share is None:
        return standard_normal(seed, "reward", rollout_id)
    logit = math.log(load.pass_share / (1 - load.pass_share))
    logit += _PASS_SPREAD * standard_normal(seed, "pass", task.task_id)
    return float(uniform(seed, "reward", rollout_id) < 1 / (1 + math.exp(-logit)))
