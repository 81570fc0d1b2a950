"""Agents that agent workers load by name: good ones, and ones that block, crash, exit, fork and leave things behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time

import numpy as np

from tailrace.environments import AgentResult, EnvironmentSpec, Observation, Policy
from tailrace.records import Json, Message, Reply, Task

ROWS: list[dict[str, Json]] = [{"behave": "well"}]


async def behaving(task: Task, policy: Policy) -> AgentResult:
    """Two turns; what else happens is what the row asks for."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    reply = await policy.chat(messages, stop=["stop"] if task["behave"] == "stop" else ())
    info = await misbehave(str(task["behave"]), policy, reply)
    messages += [reply.message, {"role": "user", "content": "go on"}]
    last = await policy.chat(messages)
    said = {"said": [reply.content, last.content], "torch_is_imported": "torch" in sys.modules}
    return AgentResult(1.0, {"pid": float(os.getpid()), "turns": 2.0}, {**said, **info})


async def misbehave(behave: str, policy: Policy, reply: Reply) -> dict[str, Json]:  # noqa: PLR0912
    match behave:
        case "sleep":
            time.sleep(600)  # noqa: ASYNC251
        case "spin":
            spin()
        case "crash":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "exit in a task":
            await asyncio.ensure_future(leave())
        case "print":
            print("said by an agent")
            sys.stdout.flush()
        case "raise":
            raise ZeroDivisionError("of the user")
        case "wait":
            await asyncio.sleep(600)
        case "fork":
            os.fork()  # the copy goes on as if it were the worker
        case "leave a process":
            os.system("sleep 600 &")  # noqa: ASYNC221
        case "leave a thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
        case "numpy":
            return {"array": np.arange(3), "number": np.float32(0.5)}
        case "unserializable":
            return {"it": object()}
        case "rewrite":
            await policy.chat([{"role": "user", "content": "something else"}])
        case "columns":
            policy.set_column(reply, "weights", np.full((reply.completion.num_tokens, 2), 0.5))
            policy.demonstrate([{"role": "user", "content": "go"}, {"role": "assistant", "content": "well"}])
    return {}


def spin() -> None:
    while True:
        pass


async def leave() -> None:
    sys.exit(4)


class Counting:
    """Counts its steps on an event loop."""

    async def reset(self, task: Task) -> Observation:
        self.steps = 0
        return Observation.user("go")

    async def step(self, reply: Message) -> Observation:
        self.steps += 1
        if self.steps == 3:
            return Observation.end(1.0, metrics={"pid": float(os.getpid())})
        return Observation.user(str(self.steps), reward=0.25)


async def grade(task: Task, messages: list[Message]) -> float:
    """A reward that may fail, or end everything."""
    match task["behave"]:
        case "raise in the reward":
            raise ZeroDivisionError("of the reward")
        case "exit in the reward":
            sys.exit(5)
    return 0.75


def slow_grade(task: Task, messages: list[Message]) -> float:
    """Synchronous: it runs in a killable process of its own."""
    return float(os.getpid())


def agents() -> EnvironmentSpec:
    return EnvironmentSpec(name="agents", agent=behaving, train_tasks=ROWS)


def counting() -> EnvironmentSpec:
    return EnvironmentSpec(name="counting", environment=Counting, train_tasks=ROWS, columns=("steps",))


def graded() -> EnvironmentSpec:
    return EnvironmentSpec(name="graded", agent=behaving, reward=grade, train_tasks=ROWS)


def checked() -> EnvironmentSpec:
    return EnvironmentSpec(name="checked", agent=behaving, reward=slow_grade, train_tasks=ROWS)


def broken(*, ends: bool = False) -> EnvironmentSpec:
    """Can be loaded in the process that has marked itself, and nowhere else."""
    if os.environ.get("TAILRACE_TEST_PARENT") != str(os.getpid()):
        if ends:
            os._exit(7)
        raise RuntimeError("only in the parent")
    return EnvironmentSpec(name="broken", agent=behaving, train_tasks=ROWS)
