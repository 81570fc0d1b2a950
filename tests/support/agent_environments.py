"""Agents that agent workers load by name: good ones, and ones that block, crash, exit, fork and leave things behind."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import httpx
import numpy as np

from tailrace.environments import (
    AgentResult,
    EnvironmentSpec,
    JudgeSettings,
    NamedReward,
    Observation,
    Policy,
    brought_tasks,
    outside_agent,
)
from tailrace.errors import JudgeFailed
from tailrace.records import Float32Array, Group, Json, Message, Reply, Reward, Rollout, RolloutId, Task
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.segments import BranchWriter, Placed

LARGE = ("much", "damage what it sends")
"""What is told to the policy is too much for a message between processes."""
ROWS: list[dict[str, Json]] = [{"behave": "well"}]
MEETING = threading.Barrier(40)
"""More than the threads that asyncio's loops have, whatever the machine."""


async def behaving(task: Task, policy: Policy) -> AgentResult:
    """Two turns; what else happens is what the row asks for."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    reply = await policy.chat(messages, stop=["stop"] if task["behave"] == "stop" else ())
    info = await misbehave(str(task["behave"]), policy, reply)
    go_on = "go on " * (6000 if task["behave"] in LARGE else 1)
    messages += [reply.message, {"role": "user", "content": go_on}]
    last = await policy.chat(messages)
    said = {"said": [reply.content, last.content], "torch_is_imported": "torch" in sys.modules}
    return AgentResult(1.0, {"pid": float(os.getpid()), "turns": 2.0}, {**said, **info})


async def misbehave(behave: str, policy: Policy, reply: Reply) -> dict[str, Json]:  # noqa: PLR0912
    match behave:
        case "sleep":
            time.sleep(600)  # noqa: ASYNC251
        case "spin":
            spin()
        case "compute":
            until_s = time.monotonic() + 0.4
            while time.monotonic() < until_s:
                pass
        case "crash":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "panic":
            raise Panic("of native code")
        case "panic in parallel":
            async with asyncio.TaskGroup() as turns:
                turns.create_task(panic())
        case "break its worker":
            break_sending()
        case "exit in a task":
            await asyncio.ensure_future(leave())
        case "meet":
            await asyncio.to_thread(MEETING.wait, 30)
        case "print":
            print("said by an agent")
            sys.stdout.flush()
        case "ask for half a token":
            await policy.chat([{"role": "user", "content": "go"}], max_tokens=3 / 2)  # type: ignore[arg-type]
        case "raise":
            raise ZeroDivisionError("of the user")
        case "raise what has no text":
            raise Speechless
        case "raise half a character":
            raise ValueError("\ud83d")
        case "wait":
            await asyncio.sleep(600)
        case "fork":
            os.fork()  # the copy goes on as if it were the worker
        case "leave a process":
            os.system("sleep 600 &")  # noqa: ASYNC221
        case "block signals":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        case "damage what it sends":
            damage_next_branches()
        case "leave a thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
        case "start a process":
            return {"path": child_path()}
        case "numpy":
            return {"array": np.arange(3), "number": np.float32(0.5)}
        case "unserializable":
            return {"it": object()}
        case "fails to convert":
            return {"it": Unconvertible(RuntimeError("has no storage"))}
        case "panics while it converts":
            return {"it": Unconvertible(Panic("in an array"))}
        case "rewrite":
            await policy.chat([{"role": "user", "content": "something else"}])
        case "columns":
            policy.set_column(reply, "weights", np.full((reply.completion.num_tokens, 2), 0.5))
            policy.demonstrate([{"role": "user", "content": "go"}, {"role": "assistant", "content": "well"}])
    return {}


def child_path() -> Json:
    """`PYTHONPATH` of what this process starts."""
    code = "import json, os; print(json.dumps(os.environ.get('PYTHONPATH')))"
    found: Json = json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    return found


class Panic(BaseException):
    """As extension modules raise it: no `Exception`."""


async def earning(task: Task, policy: Policy) -> object:
    """One turn, and a reward that is none, or cannot be sent as it is."""
    await policy.chat([{"role": "user", "content": "go"}])
    match task["behave"]:
        case "forget to await":
            return earned()
        case "complex":
            return 1j
        case "huge":
            return 2**200
        case "complex metric":
            return AgentResult(1.0, {"part": 1j, "turns": 1.0}, {"said": "yes"})  # type: ignore[dict-item]
        case "object as info":
            return AgentResult(1.0, info={"it": object()})  # type: ignore[dict-item]
        case "huge info":
            return AgentResult(1.0, info={"it": 2**200})
    return Fraction(1, 4)


async def earned() -> float:
    return 1.0


async def score_earned(task: Task, messages: list[Message]) -> object:
    return earned() if task["behave"] == "forget to await in the reward" else 0.5


async def panic() -> None:
    raise Panic("in a task")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unconvertible:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def tolist(self) -> Json:
        raise self._error


def break_sending() -> None:
    """As a defect of Tailrace's own would."""

    def place_nothing(writer: BranchWriter, branches: list[BranchData]) -> Placed | None:
        raise RuntimeError("a defect")

    BranchWriter.place = place_nothing  # type: ignore[method-assign]


def damage_next_branches() -> None:
    """Overwrites a byte of the shared memory in which the next large branches leave this process."""
    place = BranchWriter.place

    def place_and_damage(writer: BranchWriter, branches: list[BranchData]) -> Placed | None:
        BranchWriter.place = place  # type: ignore[method-assign]
        placed = place(writer, branches)
        assert placed is not None
        (file,) = [int(one.name) for one in Path("/proc/self/fd").iterdir() if is_first_segment(one)]
        os.pwrite(file, b"damage", 2000)
        return placed

    BranchWriter.place = place_and_damage  # type: ignore[method-assign]


def is_first_segment(descriptor: Path) -> bool:
    try:
        return "tailrace-branches 0" in str(descriptor.readlink())
    except OSError:  # that of the folder itself
        return False


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
        case "panic in the reward":
            raise Panic("of the reward")
    return 0.75


def slow_grade(task: Task, messages: list[Message]) -> AgentResult | float:
    """Synchronous: it runs in a killable process of its own."""
    if task["behave"] == "start a process":
        return AgentResult(1.0, info={"path_of_reward": child_path()})
    return float(os.getpid())


def agents() -> EnvironmentSpec:
    return EnvironmentSpec(name="agents", agent=behaving, train_tasks=ROWS)


def counting() -> EnvironmentSpec:
    return EnvironmentSpec(name="counting", environment=Counting, train_tasks=ROWS, columns=("steps",))


def graded() -> EnvironmentSpec:
    return EnvironmentSpec(name="graded", agent=behaving, reward=grade, train_tasks=ROWS)


def earns() -> EnvironmentSpec:
    return EnvironmentSpec(name="earns", agent=earning, train_tasks=ROWS)  # type: ignore[arg-type]


def earns_by_function() -> EnvironmentSpec:
    reward = score_earned
    return EnvironmentSpec(name="earns_by_function", agent=earning, reward=reward, train_tasks=ROWS)  # type: ignore[arg-type]


def checked() -> EnvironmentSpec:
    return EnvironmentSpec(name="checked", agent=behaving, reward=slow_grade, train_tasks=ROWS)


def broken(*, ends: bool = False) -> EnvironmentSpec:
    """Can be loaded in the process that has marked itself, and nowhere else."""
    if os.environ.get("TAILRACE_TEST_PARENT") != str(os.getpid()):
        if ends:
            os._exit(7)
        raise RuntimeError("only in the parent")
    return EnvironmentSpec(name="broken", agent=behaving, train_tasks=ROWS)


def ranked_while(path: str) -> EnvironmentSpec:
    """Can be loaded while that file is there, and always in the process that has marked itself."""
    if os.environ.get("TAILRACE_TEST_PARENT") != str(os.getpid()) and not Path(path).exists():
        raise RuntimeError("half saved")
    return EnvironmentSpec(name="ranked_while", agent=behaving, score_group=rank, train_tasks=ROWS)


MISBEHAVING = ("sleep", "exit", "sys.exit", "interrupt", "crash", "fork", "leave a thread", "block signals", "raise")


def misbehaving() -> EnvironmentSpec:
    """All that may happen, beside agents that behave well; rewards differ."""
    numbers = itertools.count()

    async def agent(task: Task, policy: Policy) -> AgentResult:
        return replace(await behaving(task, policy), reward=next(numbers) % 7 / 7)

    rows: list[dict[str, Json]] = [{"behave": behave} for behave in (*MISBEHAVING, *["well"] * 9)]
    return EnvironmentSpec(name="misbehaving", agent=agent, train_tasks=rows, trusted=True)


RETURNED: dict[str, Callable[[int], object]] = {
    "plain numbers": float,
    "fractions": lambda place: Fraction(place, 4),
    "results and numbers": lambda place: float(place) if place else AgentResult(0.5),
    "results and words": lambda place: "good" if place else AgentResult(0.5),
    "complex results": lambda _: AgentResult(1j),  # type: ignore[arg-type]
    "metrics of a word": lambda _: AgentResult(0.5, "good"),  # type: ignore[arg-type]
}
"""For each rollout, by its place in the group: what is short for its reward, or is none."""
SET: dict[str, Callable[[int], object]] = {
    "numbers": lambda place: np.float32(place / 2),
    "fractions that are set": lambda place: Fraction(place, 4),
    "words": lambda _: "good",
    "complex": lambda _: 1j,
}
"""The same, where `score_group` sets it."""


def give(group: Group, behave: str) -> Group | list[object]:
    if behave in RETURNED:
        return [RETURNED[behave](place) for place, _ in enumerate(group.rollouts)]
    for place, rollout in enumerate(group.rollouts):
        rollout.reward = SET[behave](place)  # type: ignore[assignment]
    return group


async def rank(group: Group) -> Group | list[Group] | list[AgentResult] | None:
    """Scores a group in the way that its row asks for."""
    match group.task["behave"]:
        case "results" | "results with advantages" as behave:
            group.advantages = some_advantages(group) if behave != "results" else None
            return [AgentResult(float(number), {"place": float(number)}) for number, _ in enumerate(group.rollouts)]
        case "split":
            first, *others = group.rollouts
            return [Group(group.group_id, group.task, [first], metadata={"part": 0}), replace_rollouts(group, others)]
        case str(how) if how in (*RETURNED, *SET):
            return give(group, how)  # type: ignore[return-value]
        case "drop":
            return None
        case "foreign":
            return Group(group.group_id, group.task, [replace(group.rollouts[0], rollout_id=RolloutId("elsewhere"))])
        case "raise in the score":
            raise ZeroDivisionError("of the score")
        case "exit in the score":
            sys.exit(6)
        case "wait in the score":
            await asyncio.sleep(600)
        case "crash in the score":
            ctypes.string_at(0)
    for number, rollout in enumerate(group.rollouts):
        tokens = rollout.branches[0].num_tokens
        rollout.reward = Reward(float(number), {"pid": float(os.getpid())}, {"tokens": tokens})
        rollout.metadata["place"] = number
        rollout.branches[0].set_column("place", np.full(tokens, number))
    group.metadata["ranked"] = True
    group.metrics["ranked"] = 1.0
    group.advantages = some_advantages(group)
    return group


def some_advantages(group: Group) -> list[float | Float32Array]:
    """A number, and others per token."""
    return [0.5, *(np.full(rollout.branches[0].num_tokens, 0.25, np.float32) for rollout in group.rollouts[1:])]


def replace_rollouts(group: Group, rollouts: list[Rollout]) -> Group:
    group.rollouts = rollouts
    for rollout in rollouts:
        rollout.reward = Reward(1.0)
    return group


def ranked() -> EnvironmentSpec:
    return EnvironmentSpec(name="ranked", agent=behaving, score_group=rank, train_tasks=ROWS)


class ByPlace:
    """A judge's format: the later the better; says where it was asked."""

    def prompt(self, group: Group, rubric: str) -> list[Message]:
        return [{"role": "user", "content": f"judge {len(group.rollouts)}"}]

    def scores(self, answer: str, group: Group) -> list[float]:
        if group.task["behave"] == "crash in the judge":
            ctypes.string_at(0)
        group.metadata["judged in"] = os.getpid()
        if answer != "the verdict":
            raise JudgeFailed(f"it said {answer!r}")
        return [number / 10 for number, _ in enumerate(group.rollouts)]


def judged(url: str | None = None) -> EnvironmentSpec:
    judge = JudgeSettings(url=url, own_weight=0.5, retries=1, retry_pause_s=0.0)
    return EnvironmentSpec(name="judged", agent=behaving, judge=judge, judge_format=ByPlace(), train_tasks=ROWS)


async def unrewarded_agent(task: Task, policy: Policy) -> AgentResult:
    return replace(await behaving(task, policy), reward=None)


def unrewarded(*, is_judged: bool = False) -> EnvironmentSpec:
    """Rollouts that only their group's score gives a reward."""
    spec = EnvironmentSpec(name="unrewarded", agent=unrewarded_agent, score_group=rank, train_tasks=ROWS)
    return replace(spec, score_group=None, judge=JudgeSettings(), judge_format=ByPlace()) if is_judged else spec


async def compared(prompts: list[object], completions: list[object], **columns: object) -> list[float]:
    """A named reward for whole groups, by the process that it runs in."""
    return [float(os.getpid()) for _ in completions]


async def count_before(prompts: list[list[object]], completions: list[list[object]], **_: object) -> list[float]:
    """How many messages came before the first reply, in hundreds, and from there on."""
    return [100.0 * len(before) + len(after) for before, after in zip(prompts, completions, strict=True)]


async def shown(task: Task, policy: Policy) -> None:
    await policy.chat([{"role": role, "content": role} for role in ("user", "assistant", "user")])  # type: ignore[misc]


def shown_before() -> EnvironmentSpec:
    """The prompt shows an answer; scored by itself, and with its group."""
    rewards = {"alone": NamedReward(count_before), "together": NamedReward(count_before, together=True)}
    return EnvironmentSpec(name="shown_before", agent=shown, rewards=rewards, train_tasks=ROWS)


async def sum_ids(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


async def talk_to_several(task: Task, policy: Policy) -> None:
    """Its last turn goes on with the first conversation, whose branch is neither the last nor where it was."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    policy.demonstrate([*messages, {"role": "assistant", "content": "well"}], weight=0.0)
    reply = await policy.chat(messages)
    await policy.chat([{"role": "user", "content": "help"}])
    await policy.chat([*messages, reply.message, {"role": "user", "content": "go on"}])


def several() -> EnvironmentSpec:
    rewards = {"alone": NamedReward(sum_ids), "together": NamedReward(sum_ids, together=True)}
    return EnvironmentSpec(name="several", agent=talk_to_several, rewards=rewards, train_tasks=ROWS)


async def has_thought(completions: list[list[Message]], **_: object) -> list[float]:
    return [float(completion[0]["content"].startswith("<think>")) for completion in completions]


def thoughtful() -> EnvironmentSpec:
    """Rewards for replies that reason; scored by itself, and with its group."""
    rewards = {"alone": NamedReward(has_thought), "together": NamedReward(has_thought, together=True)}
    return EnvironmentSpec(name="thoughtful", agent=shown, rewards=rewards, train_tasks=ROWS)


def weighed() -> EnvironmentSpec:
    reward = NamedReward(compared, together=True)
    return EnvironmentSpec(name="weighed", agent=behaving, rewards={"compared": reward}, train_tasks=ROWS)


async def over_http(task: Task, policy: Policy) -> AgentResult:
    """Two turns by requests, as a program of its own would make them."""
    async with policy.endpoint() as endpoint:
        async with httpx.AsyncClient(timeout=60, headers={"x-api-key": endpoint.key}) as client:
            messages: list[Message] = [{"role": "user", "content": "go"}]
            for _ in range(2):
                answer = await client.post(f"{endpoint.openai_url}/chat/completions", json={"messages": messages})
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return AgentResult(1.0, {"pid": float(os.getpid())}, {"said": said, "url": endpoint.root_url})


requests = EnvironmentSpec(name="requests", agent=over_http, train_tasks=ROWS)
elsewhere = EnvironmentSpec(name="elsewhere", agent=outside_agent(), train_tasks=ROWS)
impatient = EnvironmentSpec(name="impatient", agent=outside_agent(lease_s=1.0), train_tasks=ROWS)
brought = EnvironmentSpec(name="brought", agent=outside_agent(), train_tasks=brought_tasks("behave"))
