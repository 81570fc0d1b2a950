"""Environments that worker processes load by name: slow, broken and endless ones."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from tailrace.environments import EnvironmentSpec, Observation, Policy
from tailrace.records import Json, Message, Reward, Task

ROWS: list[Mapping[str, Json]] = [{"behave": "well"}]


class Panic(BaseException):
    """As extension modules raise it: no `Exception`."""


FAILURES = {"raise": ZeroDivisionError("of the user"), "exit": SystemExit(4), "panic": Panic("of native code")}


class Counting:
    """Answers how often it was stepped and in which process; the reply may ask for trouble."""

    def reset(self, task: Task) -> Observation:
        self.steps = 0
        self.trail = f"{task['behave']}:{task.seed}"
        if task["behave"] == "hang in reset":
            while True:
                pass
        return Observation.user("go")

    def step(self, reply: Message) -> Observation:
        self.steps += 1
        self.trail += f" {reply['content']}"
        match reply["content"]:
            case "hang":
                while True:
                    pass
            case "hang in a child":
                os.system("sleep 600")
            case "die":
                os._exit(3)
            case "raise" | "exit" | "panic" as failure:
                raise FAILURES[failure]
            case "fork" | "wait for a fork" | "leave a thread" | "block signals" as trouble:
                _misbehave(trouble)
            case "print":
                print("to the log, not into the pipe")
                sys.stdout.flush()
            case "unserializable":
                return Observation(columns={"it": object()})
            case "numpy":
                return Observation.end(np.float32(0.5), columns={"array": np.arange(3)})
            case "no observation":
                return "much"  # type: ignore[return-value]
            case "not a number":
                return Observation.end("much")  # type: ignore[arg-type]
        metrics = {"steps": float(self.steps), "pid": float(os.getpid())}
        if self.steps == 3:
            return Observation.end(1.0, metrics=metrics)
        return Observation(messages=[{"role": "user", "content": str(self.steps)}], reward=0.25, metrics=metrics)


def _misbehave(trouble: str) -> None:
    """And return."""
    if trouble == "fork":
        os.fork()
    elif trouble == "wait for a fork":
        if (copy := os.fork()) == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 7
    elif trouble == "leave a thread":
        threading.Thread(target=threading.Event().wait).start()
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))


def counting() -> EnvironmentSpec:
    return EnvironmentSpec(name="counting", environment=Counting, train_tasks=ROWS, columns=("trail",))


async def echo(task: Task, policy: Policy) -> None:
    await policy.chat([{"role": "user", "content": "say something"}])


def _wait_in(folder: Path) -> None:
    """Between two files: one says that it began, the other that it may end."""
    (folder / "begun").touch()
    while not (folder / "end").exists():
        time.sleep(0.005)


def judge(task: Task, messages: list[Message]) -> float | Reward:
    """A synchronous reward that does what the task's row says."""
    behave = str(task["behave"])
    if behave.startswith("wait "):
        _wait_in(Path(behave.removeprefix("wait ")))
        return 0.5
    match behave:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(0.3)
            return 0.5
        case "nan":
            return float("nan")
        case "text":
            return "good"  # type: ignore[return-value]
        case "none":
            return None  # type: ignore[return-value]
        case "complex":
            return 1j  # type: ignore[return-value]
        case "fraction":
            return Fraction(1, 4)  # type: ignore[return-value]
        case "parts":
            return Reward(0.5, components={"style": 1.0}, columns={"said": messages[-1]["content"]})
    return 1.0


def loading_slowly() -> EnvironmentSpec:
    time.sleep(60)
    return EnvironmentSpec(name="loading_slowly", agent=echo, reward=judge, train_tasks=ROWS)


def judged() -> EnvironmentSpec:
    return EnvironmentSpec(name="judged", agent=echo, reward=judge, train_tasks=ROWS)
