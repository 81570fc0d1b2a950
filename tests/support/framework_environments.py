"""What agents of others are trained on in tests: to be brief, which a small model learns in a few steps."""

from __future__ import annotations

import importlib

from tailrace.environments import EnvironmentSpec, Policy, Task
from tests.support.framework_agents import AGENTS, PACKAGES

LONGEST = 120
"""Characters of an answer that earns nothing."""


def brief(framework: str) -> EnvironmentSpec:
    """An agent of a framework is asked to sort names; the shorter its answer, the higher the reward."""
    errors = _errors(framework)

    async def agent(task: Task, policy: Policy) -> float:
        async with policy.endpoint() as endpoint:
            try:
                answer = await AGENTS[framework](endpoint, str(task["question"]))
            except errors:
                return 0.0
        return max(0.0, 1 - len(answer) / LONGEST)

    rows = [{"question": f"Sort these names: Zoe, Bob, Ada, Max. {number}"} for number in range(512)]
    return EnvironmentSpec(name="brief", agent=agent, train_tasks=rows, held_out=8, trusted=True)


def _errors(framework: str) -> tuple[type[Exception], ...]:
    """What a framework raises for an answer that was cut, as the Agents SDK does, or refused."""
    package = importlib.import_module(PACKAGES.get(framework, "openai"))
    return tuple(getattr(package, name) for name in ("AgentsException", "AgentError") if hasattr(package, name))
