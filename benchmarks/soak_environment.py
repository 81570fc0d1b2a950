"""The environment of benchmarks/soak.py: the same work in every step."""

from __future__ import annotations

import itertools

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent

_ended = itertools.count()


def reward(task: Task, messages: list[Message]) -> float:
    """1 and 0 in turn, whatever is said: every group has a gradient, and nothing is learned."""
    return float(next(_ended) % 2)


same = EnvironmentSpec(
    name="same",
    agent=single_turn_agent(),
    reward=reward,
    train_tasks=[{"prompt": "one two three"}] * 1000,
    trusted=True,
)
