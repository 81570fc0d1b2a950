"""Killable worker processes for users' synchronous code (`environment.reset`, `step`, rewards) that is not trusted.

One call at a time per worker. A call that does not return in time, or soon after its rollout was cancelled, costs its
own rollout: the worker is killed with its whole process group and replaced. Other environments that lived there are
reset in the new worker, and the replies that they have answered are replayed; so an environment must do the same for
the same task (`task.seed` seeds its draws) and the same replies.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

from typing_extensions import override

from tailrace.child_processes import kill_group
from tailrace.environments import AgentResult, EnvironmentSettings, Observation, ProgramEnd
from tailrace.environments.named_rewards import ScoredRollout, TrainerState
from tailrace.errors import CorruptData, EnvironmentFailed, RolloutTimeout, SettingsError
from tailrace.records import Json, Message, Task
from tailrace.rollouts.agents import EnvironmentHost
from tailrace.rollouts.deadline import TimeLimit
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.messages import (
    LENGTH_BYTES,
    Call,
    EndEarly,
    Hello,
    Load,
    Open,
    ReadAttributes,
    Request,
    Score,
    ScoreNamed,
    ScoreProgram,
    Step,
    answer_decoder,
    pack,
)
from tailrace.rollouts.workers.starting import worker_environment
from tailrace.timeouts import timeout
from tailrace.tracing.output_log import OutputLog

CANCELLED_CALL_S = 1.0
"""Seconds that a call has to return once its rollout was cancelled; then its worker process is killed."""
CLOSE_S = 2.0
"""Seconds that a worker may take to end by itself once its pipe is closed; then it is killed."""


class WorkerPool:
    """The rollout workers of a run; each is started when it is first needed."""

    def __init__(
        self,
        settings: RolloutSettings,
        environments: Mapping[str, EnvironmentSettings],
        *,
        log_path: Path | None = None,
    ) -> None:
        self._environments = dict(environments)
        self._output = None if log_path is None else OutputLog(log_path)
        self._workers = [_Worker(settings, self._environments, self._output) for _ in range(settings.workers)]

    async def start(self, environments: Iterable[str]) -> None:
        """Start every worker now, and load these environments there, instead of with the first rollout."""
        names = list(environments)
        async with asyncio.TaskGroup() as starting:
            for worker in self._workers if names else []:
                starting.create_task(worker.start(names))

    async def reward(self, task: Task, messages: list[Message]) -> AgentResult:
        """What the reward function of the task's environment returns. Raises `RolloutError`."""
        return AgentResult(**await self._score(task, Score(task, messages)))

    async def program_reward(self, end: ProgramEnd) -> AgentResult:
        """What the reward function of a program's environment returns. Raises `RolloutError`."""
        return AgentResult(**await self._score(end.task, ScoreProgram(end)))

    async def named_rewards(
        self, task: Task, rollouts: Sequence[ScoredRollout], names: Sequence[str], state: TrainerState
    ) -> Mapping[str, object]:
        """What these reward functions of the task's environment return, by name. Raises `RolloutError`."""
        returned: Mapping[str, object] = await self._score(task, ScoreNamed(task, list(rollouts), list(names), state))
        return returned

    async def _score(self, task: Task, call: Score | ScoreProgram | ScoreNamed) -> Json:
        worker = self.least_busy(task.environment)
        async with worker.turn(task.environment):
            return await worker.call(call, task)

    def least_busy(self, environment: str) -> _Worker:
        """The worker to give this environment's next rollout or reward to. Raises `SettingsError` where none can."""
        self.require(environment)
        return min(self._workers, key=lambda worker: worker.load)

    def require(self, environment: str) -> None:
        """Raise `SettingsError` unless a worker can run this environment."""
        if not self._workers or environment not in self._environments:
            missing = "rollouts.workers is 0" if not self._workers else "it was not loaded from settings"
            raise SettingsError(
                f"environment {environment!r} has synchronous code that is not trusted, which runs in a worker "
                f"process, but {missing}; make it async, or say `trusted = true` if it always returns soon"
            )

    def kill(self) -> None:
        """End every worker at once, without waiting."""
        for worker in self._workers:
            worker.kill()

    async def close(self) -> None:
        """End every worker; those that do not end by themselves are killed."""
        async with asyncio.TaskGroup() as closing:
            for worker in self._workers:
                closing.create_task(worker.close())
        if self._output is not None:
            await asyncio.to_thread(self._output.close)


class WorkerEnvironment(EnvironmentHost):
    """One rollout's environment, living in a worker process."""

    _numbers = count()

    def __init__(self, pool: WorkerPool, task: Task) -> None:
        self._task = task
        self._worker = pool.least_busy(task.environment)
        self._worker.load += 1
        self._instance = next(self._numbers)
        self._home: Process | None = None
        self._replies: list[Message] = []

    @override
    async def reset(self, task: Task) -> Observation:
        async with self._worker.turn(task.environment) as process:
            return await self._open(process)

    @override
    async def step(self, reply: Message) -> Observation:
        value = await self._call(Step(self._instance, reply))
        self._replies.append(reply.copy())
        return Observation(**value)

    @override
    async def end_early(self) -> Observation:
        return Observation(**await self._call(EndEarly(self._instance)))

    @override
    async def read_attributes(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Json]:
        values: dict[str, Json] = await self._call(ReadAttributes(self._instance, list(names), list(optional)))
        return values

    @override
    async def close(self) -> None:
        self._worker.load -= 1
        self._worker.to_close.append(self._instance)

    async def _call(self, call: Call) -> Json:
        async with self._worker.turn(self._task.environment) as process:
            if process is not self._home:
                await self._open(process)
            return await self._worker.call(call, self._task)

    async def _open(self, process: Process) -> Observation:
        """Reset in this process, and replay the replies so far."""
        call = Open(self._instance, self._task, self._replies)
        value = await self._worker.call(call, self._task, num_steps=1 + len(self._replies))
        self._home = process
        return Observation(**value)


class _Worker:
    """One slot of the pool: a process at a time and its pipes, replaced when it is killed or dies."""

    _requests: asyncio.StreamWriter
    _answers: asyncio.StreamReader

    def __init__(
        self, settings: RolloutSettings, environments: Mapping[str, EnvironmentSettings], output: OutputLog | None
    ) -> None:
        self._settings = settings
        self._environments = environments
        self._output = output
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._loaded: set[str] = set()
        self._body_bytes: int | None = None
        self.to_close: list[int] = []
        """Environments that the worker drops with its next call."""
        self.load = 0
        """Environments living here, and calls waiting or running."""

    @asynccontextmanager
    async def turn(self, environment: str) -> AsyncIterator[Process]:
        """The process for one caller at a time, with the environment loaded. Waits for its turn.

        Raises `EnvironmentFailed` where the environment cannot be loaded.
        """
        self.load += 1
        try:
            async with self._turn:
                if self._process is None or self._process.returncode is not None:
                    self._process = await self._start()
                process = self._process
                if environment not in self._loaded:
                    limit = TimeLimit(self._settings.worker_start_timeout_s, "rollouts.worker_start_timeout_s")
                    await self._exchange(Load(environment), limit, f"loading environment {environment!r}")
                    self._loaded.add(environment)
                yield process
        finally:
            self.load -= 1

    async def start(self, environments: Sequence[str]) -> None:
        """Start the process and load these environments."""
        for environment in environments:
            async with self.turn(environment):
                pass

    async def call(self, call: Call, task: Task, *, num_steps: int = 1) -> Json:
        """What user code returned, inside a `turn`. It may take `worker_timeout_s` for each of `num_steps`.

        Raises `RolloutTimeout` where it did not return in time (the process is killed), `EnvironmentFailed` where it
        raised or ended the process.
        """
        limit = TimeLimit(self._settings.worker_timeout_s * num_steps, "rollouts.worker_timeout_s")
        return await self._exchange(call, limit, f"task {task.task_id}: {_NAMES[type(call)]}")

    async def close(self) -> None:
        """Close the pipe, which ends an idle worker; kill what is left."""
        if (process := self._process) is not None:
            self._requests.close()
            with suppress(TimeoutError):
                async with timeout(CLOSE_S):
                    await process.wait()
            self.kill()
            await process.wait()

    async def _start(self) -> Process:
        """A fresh process, in a process group of its own, one thread for numerics."""
        with nullcontext() if self._output is None else self._output.writer() as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tailrace.rollouts.workers.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=worker_environment(),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        self._loaded, self._body_bytes, self.to_close = set(), None, []
        settings = {name: chosen.model_dump_json() for name, chosen in self._environments.items()}
        self._requests.write(pack(Hello(sys.path, settings)))
        return process

    async def _exchange(self, call: Call, limit: TimeLimit, what: str) -> Json:
        process = self._process
        assert process is not None  # calls are made inside a `turn`
        try:
            async with timeout(limit.limit_s):
                self._send(call, what)
                answer = answer_decoder.decode(await self._read())
        except TimeoutError:
            self.kill()
            await process.wait()
            raise RolloutTimeout(
                f"{what} did not return within {limit.limit_s:g} s ({limit.setting}); its worker process was killed"
            ) from None
        except asyncio.CancelledError:
            await self._finish_cancelled_call(process)
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            status = await process.wait()
            raise EnvironmentFailed(f"{what} ended its worker process (status {status})") from None
        except CorruptData as error:  # code of users wrote into our pipe, or nests without end
            self.kill()
            raise EnvironmentFailed(f"{what} answered with what cannot be read: {error}") from error
        if answer.failure is not None:
            failed = EnvironmentFailed(f"{what} raised {answer.failure}")
            failed.is_mistake = answer.is_mistake
            raise failed
        return answer.value

    def _send(self, call: Call, what: str) -> None:
        try:
            message = pack(Request(call, self.to_close))
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(f"{what} cannot be sent to a worker process: {error}") from error
        self.to_close = []
        self._requests.write(message)

    async def _read(self) -> bytes:
        """One answer's body. May be cancelled and called again."""
        if self._body_bytes is None:
            self._body_bytes = int.from_bytes(await self._answers.readexactly(LENGTH_BYTES), "little")
        body = await self._answers.readexactly(self._body_bytes)
        self._body_bytes = None
        return body

    async def _finish_cancelled_call(self, process: Process) -> None:
        """Wait until a call whose caller was cancelled has returned, or end the process, so that nothing runs on."""
        try:
            async with timeout(CANCELLED_CALL_S):
                await self._read()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            await process.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process group at once; a reader of its pipe sees the end."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._process = None


_NAMES: dict[type, str] = {
    Open: "reset of the environment",
    Step: "step of the environment",
    EndEarly: "end_early of the environment",
    ReadAttributes: "reading attributes of the environment",
    Score: "the reward function",
    ScoreProgram: "the reward function",
    ScoreNamed: "the reward functions",
}
