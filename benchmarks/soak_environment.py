"""The environment of benchmarks/soak.py: the same work in every step."""

from __future__ import annotations

import itertools

from tailrace.environments import EnvironmentSpec, Policy, Task

_ended = itertools.count()
TASKS = [{"question": f"Count from {number} on."} for number in range(1000)]


async def _agent(task: Task, policy: Policy) -> float:
    """Two turns; the reward does not depend on what is said, so that nothing is learned and no length drifts."""
    messages = [{"role": "user", "content": task["question"]}]
    reply = await policy.chat(messages)
    await policy.chat([*messages, reply.message, {"role": "user", "content": "Go on."}])
    return float(next(_ended) % 2)


def count() -> EnvironmentSpec:
    return EnvironmentSpec(name="count", agent=_agent, train_tasks=TASKS, trusted=True)
