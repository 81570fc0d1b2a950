"""Rollouts that are played elsewhere: the run offers them, and `outside_client.py` asks for them over HTTP.

    tailrace train quickstart --name outside --environment.name examples.own_outside:sorting
    python examples/outside_client.py runs/outside/gateway.json     # meanwhile, in another terminal

Run both from the folder above this one. The client sorts names in one turn, and says what it earned.
"""

from __future__ import annotations

import random

from tailrace.environments import EnvironmentSpec, outside_agent

NAMES = [
    "Ada",
    "Ben",
    "Carl",
    "Eva",
    "Felix",
    "Grace",
    "Hugo",
    "Iris",
    "Jane",
    "Leo",
    "Max",
    "Nina",
    "Paul",
    "Rosa",
    "Zoe",
]


def rows(count: int) -> list[dict[str, list[str]]]:
    """Two to four names each, the same ones in every process."""
    draw = random.Random(0)
    return [{"names": draw.sample(NAMES, draw.randint(2, 4))} for _ in range(count)]


sorting = EnvironmentSpec(name="sorting", agent=outside_agent(lease_s=60), train_tasks=rows(4096))
