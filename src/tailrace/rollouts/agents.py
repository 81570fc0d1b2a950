"""The agent that drives a reset/step environment.

    reset(task) ─► observation ─► chat ─► reply ─► step(reply) ─► observation ─► chat ─► ... until `done`

The rollout's reward is the sum of its observations' rewards. It also ends, with what was summed so far, where no turn,
token or context is left for another reply; only before the first reply does that fail the rollout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.environments import Agent, EnvironmentFactory, Observation, Policy
from tailrace.environments.protocol import read_columns
from tailrace.errors import BudgetExceeded, EnvironmentFailed, RequestRefused
from tailrace.records import Json, Message, Reward, Task, ToolSpec
from tailrace.rollouts.policy import RolloutPolicy
from tailrace.rollouts.scoring.rewards import require_number


class EnvironmentHost(Protocol):
    """One environment of one rollout, wherever it lives: on the event loop or in a worker process."""

    async def reset(self, task: Task) -> Observation:
        """The opening of the conversation."""
        ...

    async def step(self, reply: Message) -> Observation:
        """What the environment answers to a reply."""
        ...

    async def read_columns(self, columns: Sequence[str]) -> dict[str, Json]:
        """Attributes to save beside the rollout."""
        ...

    async def close(self) -> None:
        """Let the environment go."""
        ...


class LocalEnvironment:
    """An environment on the event loop: its methods are coroutines, or trusted to return soon."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._environment = factory()

    async def reset(self, task: Task) -> Observation:
        """See `EnvironmentHost`."""
        return await _settled(self._environment.reset(task))

    async def step(self, reply: Message) -> Observation:
        """See `EnvironmentHost`."""
        return await _settled(self._environment.step(reply))

    async def read_columns(self, columns: Sequence[str]) -> dict[str, Json]:
        """See `EnvironmentHost`."""
        return read_columns(self._environment, columns)

    async def close(self) -> None:
        """Nothing to do: the environment is garbage with its rollout."""


@dataclass(slots=True)
class _Score:
    """What the observations add up to."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Json] = field(default_factory=dict)

    def add(self, observation: Observation, task: Task) -> None:
        if observation.reward is not None:
            self.reward = (self.reward or 0.0) + require_number(
                observation.reward, f"task {task.task_id}: a step's reward"
            )
        self.metrics.update(observation.metrics)
        self.columns.update(observation.columns)


def environment_agent(
    factory: EnvironmentFactory,
    *,
    tools: Sequence[ToolSpec] = (),
    columns: Sequence[str] = (),
    saved_columns: Sequence[str] | None = None,
    scored_later: bool = False,
) -> Agent:
    """The agent of a reset/step environment whose methods may run on the event loop; see `hosted_agent`."""
    return hosted_agent(
        lambda task: LocalEnvironment(factory),
        tools=tools,
        columns=columns,
        saved_columns=saved_columns,
        scored_later=scored_later,
    )


def hosted_agent(
    host: Callable[[Task], EnvironmentHost],
    *,
    tools: Sequence[ToolSpec] = (),
    columns: Sequence[str] = (),
    saved_columns: Sequence[str] | None = None,
    scored_later: bool = False,
) -> Agent:
    """The agent of an environment that `host` makes for each rollout, wherever it lives.

    Saves what its observations report and the attributes `columns`; with `saved_columns` those alone, attributes where
    no observation reported them.

    Without a single step reward it returns None; with `scored_later` a reward of NaN, which carries the environment's
    metrics and columns to where the spec's own reward function replaces the value.
    """

    async def agent(task: Task, policy: Policy) -> Reward | None:
        environment = host(task)
        try:
            score = await _play(environment, task, policy, list(tools) or None)
            wanted = columns if saved_columns is None else [name for name in saved_columns if name not in score.columns]
            saved = {**score.columns, **(await environment.read_columns(wanted) if wanted else {})}
        finally:
            await environment.close()
        if score.reward is None and not scored_later:
            return None
        value = math.nan if score.reward is None else score.reward
        return Reward(value, components=score.metrics, columns=saved)

    return agent


async def _play(environment: EnvironmentHost, task: Task, policy: Policy, tools: list[ToolSpec] | None) -> _Score:
    score = _Score()
    observation = await environment.reset(task)
    score.add(observation, task)
    messages: list[Message] = list(observation.messages)
    replies = 0
    while not observation.done:
        try:
            reply = await policy.chat(messages, tools=tools)
        except (BudgetExceeded, RequestRefused):
            if not replies:
                raise
            return score
        replies += 1
        observation = await environment.step(reply.message)
        score.add(observation, task)
        messages.extend([reply.message, *observation.messages])
    if isinstance(policy, RolloutPolicy) and observation.messages:
        policy.keep(observation.messages)
    return score


async def _settled(result: Observation | Awaitable[Observation]) -> Observation:
    observation = await result if inspect.isawaitable(result) else result
    if not isinstance(observation, Observation):
        raise EnvironmentFailed(
            f"reset and step return an Observation; this environment returned a {type(observation).__name__}"
        )
    return observation
