"""The agent that drives a reset/step environment.

    reset(task) ─► observation ─► chat ─► reply ─► step(reply) ─► observation ─► chat ─► ... until `done`

The rollout's reward is the sum of its observations' rewards. It also ends, with what was summed so far and what
`end_early` adds, where no turn, token or context is left for another reply; only before the first reply does that fail
the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from typing_extensions import override

from tailrace.environments import AgentResult, EnvironmentFactory, EnvironmentSpec, Observation, Policy
from tailrace.environments.callables import settled
from tailrace.environments.protocol import end_early, read_attributes, require_observation
from tailrace.environments.results import finite_number
from tailrace.errors import BudgetExceeded, RequestRefused
from tailrace.records import Json, Message, Task
from tailrace.rollouts.policy import RolloutPolicy


class EnvironmentHost(Protocol):
    """One environment of one rollout, wherever it lives: on the event loop or in a worker process."""

    async def reset(self, task: Task) -> Observation:
        """The opening of the conversation."""

    async def step(self, reply: Message) -> Observation:
        """What the environment answers to a reply."""

    async def end_early(self) -> Observation:
        """What the environment says where turns or tokens ran out before it was done."""

    async def read_attributes(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Json]:
        """Attributes to save beside the rollout; of the `optional` ones those that there are."""

    async def close(self) -> None:
        """Called when the rollout has ended."""


class LocalEnvironment(EnvironmentHost):
    """An environment on the event loop: its methods are coroutines, or trusted to return soon."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._environment = factory()

    @override
    async def reset(self, task: Task) -> Observation:
        return require_observation(await settled(self._environment.reset(task)))

    @override
    async def step(self, reply: Message) -> Observation:
        return require_observation(await settled(self._environment.step(reply)))

    @override
    async def end_early(self) -> Observation:
        return require_observation(await settled(end_early(self._environment)))

    @override
    async def read_attributes(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Json]:
        return read_attributes(self._environment, names, optional)

    @override
    async def close(self) -> None:
        pass  # the environment is garbage with its rollout


async def play_environment(
    task: Task, policy: Policy, *, spec: EnvironmentSpec, host: Callable[[Task], EnvironmentHost]
) -> AgentResult:
    """Drive the environment that `host` makes to its end. The reward is None where no observation had one.

    Saves what observations report and the attributes in `spec.columns`; with `spec.info_keys` what there is of those
    keys alone, which may be attributes that the spec does not name.
    """
    environment = host(task)
    try:
        total = await _play(environment, task, policy, spec)
        keys = spec.columns if spec.info_keys is None else [key for key in spec.info_keys if key not in total.info]
        own, others = [key for key in keys if key in spec.columns], [key for key in keys if key not in spec.columns]
        info = {**total.info, **(await environment.read_attributes(own, others) if keys else {})}
    finally:
        await environment.close()
    return replace(total, info=info)


async def _play(environment: EnvironmentHost, task: Task, policy: Policy, spec: EnvironmentSpec) -> AgentResult:
    """What the observations add up to."""
    tools = list(spec.tools) or None
    observation = await environment.reset(task)
    total = _plus(AgentResult(), observation, task)
    messages: list[Message] = list(observation.messages)
    replies = 0
    while not observation.done:
        try:
            reply = await policy.chat(messages, tools=tools)
        except (BudgetExceeded, RequestRefused):
            if not replies:
                raise
            return _plus(total, await environment.end_early(), task)
        replies += 1
        observation = await environment.step(reply.message)
        total = _plus(total, observation, task)
        messages.extend([reply.message, *observation.messages])
    if isinstance(policy, RolloutPolicy) and observation.messages:
        policy.keep(observation.messages)
    return total


def _plus(total: AgentResult, observation: Observation, task: Task) -> AgentResult:
    reward = total.reward
    if observation.reward is not None:
        reward = (reward or 0.0) + finite_number(observation.reward, f"task {task.task_id}: a step's reward")
    return AgentResult(reward, {**total.metrics, **observation.metrics}, {**total.info, **observation.columns})
