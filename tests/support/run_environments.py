"""Environments for whole runs with the bundled model: quick, and as troublesome as a test asks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.environments import EnvironmentSpec, JudgeSettings, Message, Observation, Policy, Task
from tailrace.records import Group, Reward

if TYPE_CHECKING:
    from tailrace.training.checkpoints.files import StagedCheckpoint


async def answer(task: Task, policy: Policy) -> Reward:
    """One turn; a reward that differs between replies, whatever they are."""
    reply = await policy.chat([{"role": "user", "content": str(task["word"])}])
    value = zlib.crc32(reply.content.encode()) % 97 / 97
    return Reward(value, columns={"torch_is_imported": "torch" in sys.modules})


def words(count: int = 256, held_out: int = 8) -> EnvironmentSpec:
    rows = [{"word": f"word {number}"} for number in range(count)]
    return EnvironmentSpec(name="words", agent=answer, train_tasks=rows, held_out=held_out, trusted=True)


def closing(how: str) -> EnvironmentSpec:
    """What closes it raises, exits, or never ends."""

    async def close() -> None:
        if how == "exit":
            sys.exit(3)
        if how == "hang":
            await asyncio.Event().wait()
        raise ZeroDivisionError("of the close")

    return replace(words(), name="closing", close=close)


spelling = EnvironmentSpec(name="spelling", agent=answer, train_tasks=[{"word": "a"}, {"word": "b"}])
"""Finished, as a module may have it."""
wrapped = EnvironmentSpec(name="wrapped", agent=functools.partial(answer), train_tasks=[{"word": "a"}, {"word": "b"}])
"""Neither it nor its agent knows in which module it is."""


def empty() -> EnvironmentSpec:
    return EnvironmentSpec(name="empty", agent=answer)


judged_coolly = EnvironmentSpec(
    name="judged-coolly", agent=answer, train_tasks=[{"word": "a"}], judge=JudgeSettings(temperature=0.001)
)
judged_hotly = replace(words(), name="judged-hotly", judge=JudgeSettings(temperature=3.0))
judged_elsewhere = replace(words(), name="judged-elsewhere", judge=JudgeSettings(url="http://judge/v1"))


async def praise(task: Task, policy: Policy) -> float:
    """The same reward for all."""
    await policy.chat([{"role": "user", "content": "anything"}])
    return 1.0


def praising() -> EnvironmentSpec:
    return EnvironmentSpec(name="praising", agent=praise, train_tasks=[{"word": "good"}])


async def grudge(task: Task, policy: Policy) -> float:
    """The less, the better."""
    return -(await answer(task, policy)).value


def grudging() -> EnvironmentSpec:
    return EnvironmentSpec(name="grudging", agent=grudge, train_tasks=[{"word": "bad"}, {"word": "worse"}])


def cooling() -> EnvironmentSpec:
    """Two turns, the second at another temperature, each cut at the first line's end; says what it heard."""

    async def agent(task: Task, policy: Policy) -> Reward:
        messages: list[Message] = [{"role": "user", "content": str(task["word"])}]
        first = await policy.chat(messages, stop=["\n"])
        messages += [first.message, {"role": "user", "content": "go on"}]
        second = await policy.chat(messages, temperature=0.5, stop=["\n"])
        said = first.content + "|" + second.content
        return Reward(zlib.crc32(said.encode()) % 97 / 97, columns={"said": said})

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="cooling", agent=agent, train_tasks=rows, trusted=True)


def stopping() -> EnvironmentSpec:
    """Two turns of one branch, each cut at the first vowel."""

    async def agent(task: Task, policy: Policy) -> float:
        messages: list[Message] = [{"role": "user", "content": str(task["word"])}]
        first = await policy.chat(messages, stop=list("aeiou"))
        messages += [first.message, {"role": "user", "content": "go on"}]
        second = await policy.chat(messages, stop=list("aeiou"))
        return zlib.crc32(f"{first.content}|{second.content}".encode()) % 97 / 97

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="stopping", agent=agent, train_tasks=rows, trusted=True)


def weighing() -> EnvironmentSpec:
    """The agent counts the tokens of its reply, in one of two rollouts; scoring tells all tokens their place."""
    numbers = itertools.count()

    async def agent(task: Task, policy: Policy) -> Reward:
        reply = await policy.chat([{"role": "user", "content": str(task["word"])}])
        if (number := next(numbers)) % 2:
            policy.set_column(reply, "counted", [[number, 1]] * reply.completion.num_tokens)
        return Reward(zlib.crc32(reply.content.encode()) % 97 / 97)

    async def score_group(group: Group) -> Group:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                branch.set_column("place", [place + 0.5 for place in range(branch.num_tokens)])
        return group

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="weighing", agent=agent, score_group=score_group, train_tasks=rows, trusted=True)


def demonstrating(sampled: bool = True) -> EnvironmentSpec:
    """Each reply is to be the word twice, which is shown, and rewarded for nothing; or shown alone."""

    async def agent(task: Task, policy: Policy) -> float:
        messages: list[Message] = [{"role": "user", "content": str(task["word"])}]
        if sampled:
            await policy.chat(messages)
        policy.demonstrate([*messages, {"role": "assistant", "content": f"{task['word']} {task['word']}"}])
        return 0.0

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="demonstrating", agent=agent, train_tasks=rows, held_out=2, trusted=True)


def waiting() -> EnvironmentSpec:
    """Agents that wait for what never comes."""

    async def agent(task: Task, policy: Policy) -> float:
        await asyncio.Event().wait()
        return 0.0

    return EnvironmentSpec(name="waiting", agent=agent, train_tasks=[{"word": "ever"}], trusted=True)


def held(until: str) -> EnvironmentSpec:
    """Agents that wait for the file `until`, and say so by another one."""

    async def agent(task: Task, policy: Policy) -> Reward:
        Path(f"{until}.awaited").touch()
        while not Path(until).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await answer(task, policy)

    return EnvironmentSpec(name="held", agent=agent, train_tasks=[{"word": "on"}, {"word": "off"}], trusted=True)


def calling(port: int) -> EnvironmentSpec:
    """Each rollout begins with a call of a service of this machine."""

    async def agent(task: Task, policy: Policy) -> Reward:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if not await reader.readline():
                raise ConnectionResetError("the service hung up")
        finally:
            writer.close()
        return await answer(task, policy)

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="calling", agent=agent, train_tasks=rows, trusted=True)


def learned(after: int) -> EnvironmentSpec:
    """Rewards that differ inside each group of the first so many rollouts, and then are all the highest."""
    numbers = itertools.count()
    of_task: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    async def agent(task: Task, policy: Policy) -> float:
        word = str(task["word"])
        await policy.chat([{"role": "user", "content": word}])
        return 1.0 if next(numbers) >= after else float(next(of_task[word]) % 2)

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="learned", agent=agent, train_tasks=rows, trusted=True)


TROUBLES = ("raise", "nan", "text", "too long")


async def trouble(task: Task, policy: Policy) -> float:
    """What the task's row says goes wrong does."""
    word = str(task["word"])
    prompt = "long " * 5000 if word == "too long" else word
    reply = await policy.chat([{"role": "user", "content": prompt}])
    match word:
        case "raise":
            raise ZeroDivisionError("of the user")
        case "nan":
            return float("nan")
        case "text":
            return "good"  # type: ignore[return-value]
    return zlib.crc32(reply.content.encode()) % 97 / 97


def blocking() -> EnvironmentSpec:
    """Holds the event loop, never chats in one task, and rewrites its history."""

    async def agent(task: Task, policy: Policy) -> float:
        if task["word"] == "silent":
            return 0.5
        reply = await policy.chat([{"role": "user", "content": "first"}])
        time.sleep(0.6)  # noqa: ASYNC251
        said: Message = {"role": "assistant", "content": "rewritten"}
        await policy.chat([{"role": "user", "content": "first"}, said, {"role": "user", "content": "second"}])
        return zlib.crc32(reply.content.encode()) % 97 / 97

    return EnvironmentSpec(name="blocking", agent=agent, train_tasks=[{"word": "silent"}, {"word": "loud"}])


def terse() -> EnvironmentSpec:
    """Replies are cut by the agent itself, are none in one task, and fail in the terminal's red in another."""

    async def agent(task: Task, policy: Policy) -> float:
        if task["word"] == "red":
            raise ValueError("\x1b[31mred")
        if task["word"] == "loud":
            await policy.chat([{"role": "user", "content": "first"}], max_tokens=4)
        return 0.5

    rows = [{"word": word} for word in ("silent", "loud", "red")]
    return EnvironmentSpec(name="terse", agent=agent, train_tasks=rows)


def muttering() -> EnvironmentSpec:
    """Never chats, and is rewarded all the same."""
    rewards = itertools.count()

    async def agent(task: Task, policy: Policy) -> float:
        return float(next(rewards))

    return EnvironmentSpec(name="muttering", agent=agent, train_tasks=[{"word": "one"}, {"word": "two"}])


def troubled() -> EnvironmentSpec:
    rows = [{"word": word} for word in (*TROUBLES, "fine", "good", "well", "sound")]
    return EnvironmentSpec(name="troubled", agent=trouble, train_tasks=rows, required_columns=("word",))


def endless(task: Task, messages: list[Message]) -> float:
    """A synchronous reward that never returns for one task."""
    while task["word"] == "endless":
        pass
    return zlib.crc32(messages[-1]["content"].encode()) % 97 / 97


def never_returning() -> EnvironmentSpec:
    rows = [{"word": word} for word in ("endless", "fine", "good")]
    return EnvironmentSpec(name="never-returning", agent=answer, reward=endless, train_tasks=rows)


_IN_TESTS = "pytest" in sys.modules


def loading_only_here() -> EnvironmentSpec:
    """Cannot be loaded in a worker process."""
    if not _IN_TESTS:
        raise RuntimeError("not in a worker")
    return never_returning()


def without_column() -> EnvironmentSpec:
    rows = [{"word": "a"}, {"word": "b"}, {"wrod": "c"}]
    return EnvironmentSpec(
        name="without-column", agent=answer, train_tasks=rows, required_columns=("word",), trusted=True
    )


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


def signalling(number: int = signal.SIGINT, after: str = "") -> EnvironmentSpec:
    """Sends its own process a signal once a step was trained: when the file `after` holds a line."""
    sent = []

    async def agent(task: Task, policy: Policy) -> Reward:
        if not sent and _lines(Path(after)):
            sent.append(True)
            os.kill(os.getpid(), number)
        return await answer(task, policy)

    rows = [{"word": f"word {index}"} for index in range(64)]
    return EnvironmentSpec(name="signalling", agent=agent, train_tasks=rows, trusted=True)


def killed(at: str, step: int, folder: str) -> EnvironmentSpec:
    """The tasks of `words`, in a process that dies once it wrote the state of `step`, or before its checkpoint.

    First it waits until the run in `folder` has a checkpoint of step 2 and metrics of it.
    """

    def die() -> None:
        while _lines(Path(folder) / "metrics.jsonl") < 2 or not (Path(folder) / "checkpoints/step_000002").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if at == "state":
        from tailrace.run.scheduler_states import SchedulerStates

        write = SchedulerStates.write

        def write_and_die(states: SchedulerStates, written: int, state: bytes) -> None:
            write(states, written, state)
            if written == step:
                die()

        SchedulerStates.write = write_and_die  # type: ignore[method-assign]
    else:
        from tailrace.training.trainer import Trainer

        stage = Trainer.stage_checkpoint

        def die_or_stage(trainer: Trainer, parent: Path) -> StagedCheckpoint:
            if trainer.step == step:
                die()
            return stage(trainer, parent)

        Trainer.stage_checkpoint = die_or_stage  # type: ignore[method-assign]
    return words(20, 0)


released = asyncio.Event()
"""Lets the agents of `stubborn` go."""


def stubborn() -> EnvironmentSpec:
    """Agents that refuse to be cancelled until `released`; the first of them asks for an end by Ctrl-C."""
    asked = []

    async def agent(task: Task, policy: Policy) -> Reward:
        if not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
        return await answer(task, policy)

    rows = [{"word": f"word {index}"} for index in range(64)]
    return EnvironmentSpec(name="stubborn", agent=agent, train_tasks=rows, trusted=True)


def tidying() -> EnvironmentSpec:
    """From the third group on scoring waits for ever, and takes a second to end where it is cancelled."""
    numbers = itertools.count()

    async def score_group(group: Group) -> Group:
        if next(numbers) >= 2:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1)
        return group

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="tidying", agent=answer, score_group=score_group, train_tasks=rows, trusted=True)


def leaving_a_thread() -> EnvironmentSpec:
    """Agents that start work in a thread and forget it; it never returns."""

    async def agent(task: Task, policy: Policy) -> Reward:
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        return await answer(task, policy)

    rows = [{"word": f"word {index}"} for index in range(64)]
    return EnvironmentSpec(name="leaving-a-thread", agent=agent, train_tasks=rows, trusted=True)


class Talk:
    """Answers every reply, until no turn is left."""

    async def reset(self, task: Task) -> Observation:
        self.replies = 0
        return Observation.user(str(task["word"]))

    async def step(self, reply: Message) -> Observation:
        self.replies += 1
        value = zlib.crc32(reply["content"].encode()) % 97 / 97
        told = {"said": reply["content"], "loud": reply["content"].isupper()}
        return Observation(messages=[{"role": "user", "content": "go on"}], reward=value, columns=told)


def talking() -> EnvironmentSpec:
    return EnvironmentSpec(name="talking", environment=Talk, train_tasks=[{"word": f"word {n}"} for n in range(64)])


def hanging() -> EnvironmentSpec:
    return EnvironmentSpec(name="hanging", agent=sleep, train_tasks=[{"word": "hang"}])


async def sleep(task: Task, policy: Policy) -> Reward:
    """Never done before its time limit."""
    await asyncio.Event().wait()
    return await answer(task, policy)


def sleeping() -> EnvironmentSpec:
    return EnvironmentSpec(name="sleeping", agent=sleep, train_tasks=[{"word": f"word {n}"} for n in range(64)])


async def answer_in_training(task: Task, policy: Policy) -> Reward:
    """Never done on held-out tasks."""
    if "/eval/" in task.task_id:
        await asyncio.Event().wait()
    return await answer(task, policy)


def hanging_when_evaluated() -> EnvironmentSpec:
    rows = [{"word": f"word {n}"} for n in range(64)]
    return EnvironmentSpec(name="hanging", agent=answer_in_training, train_tasks=rows, held_out=8)


_numbers = itertools.count()


def uneven(metrics: str, max_steps: int) -> EnvironmentSpec:
    """One rollout in four takes four turns; some fail after a turn, some groups never differ.

    Of those that take four turns, one group at a time waits after its first until two more steps are told in the file
    `metrics`: what it sampled before is then too old, however fast steps are, and others are trained meanwhile. The
    last of `max_steps` has no others.
    """
    waiting: set[int] = set()

    async def agent(task: Task, policy: Policy) -> Reward:
        number = int(str(task["word"]).split()[1])
        messages: list[Message] = [{"role": "user", "content": str(task["word"])}]
        for turn in range(4 if number % 4 == 0 else 1):
            messages.append((await policy.chat(messages)).message)
            messages.append({"role": "user", "content": "go on"})
            due = _lines(Path(metrics)) + 2
            if number % 4 == 0 and turn == 0 and due < max_steps and waiting <= {number}:
                waiting.add(number)
                try:
                    while _lines(Path(metrics)) < due:  # noqa: ASYNC110 - a file has no event
                        await asyncio.sleep(0.02)
                finally:
                    waiting.discard(number)
        if number % 5 == 1:
            raise ZeroDivisionError("of the user")
        return Reward(0.0 if number % 5 == 2 else next(_numbers) % 7 / 7)

    rows = [{"word": f"word {number}"} for number in range(64)]
    return EnvironmentSpec(name="uneven", agent=agent, train_tasks=rows, trusted=True)


async def converse(task: Task, policy: Policy) -> float:
    """Three turns that only append."""
    messages: list[Message] = []
    for question in (task["word"], "and then?", "why?"):
        messages.append({"role": "user", "content": str(question)})
        reply = await policy.chat(messages)
        messages.append({"role": "assistant", "content": reply.content})
    return zlib.crc32(repr(messages).encode()) % 97 / 97


def conversing() -> EnvironmentSpec:
    rows = [{"word": f"word {number}"} for number in range(32)]
    return EnvironmentSpec(name="conversing", agent=converse, train_tasks=rows, trusted=True)
