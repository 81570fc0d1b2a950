"""The agents of `rollout_workers.py`, and the generator of its runs: real work in Python, made-up tokens."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
from scheduler_peers import PeersLauncher
from typing_extensions import override

from tailrace.environments import EnvironmentSpec, Message, Policy, Task
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import Engine
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.run.roles import RoleSettings

STEP_S = 0.002
"""Of the engine: one token of every request."""


def working(*, turns: int, work_s: float) -> EnvironmentSpec:
    """Agents that compute for `work_s` of CPU time after each of their turns; rewards differ in every group."""
    count = 0

    async def agent(task: Task, policy: Policy) -> float:
        nonlocal count
        messages: list[Message] = [{"role": "user", "content": str(task["text"])}]
        for _ in range(turns):
            reply = await policy.chat(messages)
            _work(work_s)
            messages += [reply.message, {"role": "user", "content": "go on"}]
        count += 1
        return float(count % 7)

    rows = [{"text": f"Sort these names: {number}"} for number in range(4096)]
    return EnvironmentSpec(name="working", agent=agent, train_tasks=rows, trusted=True)


def _work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(100))


class WorkersLauncher(PeersLauncher):
    """`placement = "rollout_worker_agents:WorkersLauncher"`: the trainer does no work, the generator is simulated."""

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False) -> RoleHandle:
        if spec.name == "trainer":
            return super().start(spec, is_replaceable=is_replaceable)
        spec = replace(spec, entry="rollout_worker_agents:generator")
        return LocalLauncher.start(self, spec, is_replaceable=is_replaceable)


async def generator(role: Role) -> None:
    """Serves a simulated engine with as many slots as rollouts may run."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    run = role_settings.run

    def make_engine() -> Engine:
        return SimulatedEngine(slots=run.max_running, step_s=STEP_S)

    await role_settings.transports().serve_generator(role, lambda payloads: Generator(make_engine, payloads=payloads))
