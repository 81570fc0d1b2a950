"""Killable worker processes for users' synchronous code (`environment.reset`, `step`, rewards) that is not trusted.

One call at a time per worker. A call that does not return in time, or soon after its rollout was cancelled, costs its
own rollout: the worker is killed with its whole process group and replaced. Other rollouts whose environments lived
there are rebuilt in the new worker, by resetting them and replaying the replies that they have answered; so an
environment must do the same for the same task (`task.seed` is there to draw from) and the same replies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

from typing_extensions import override

from tailrace.environments import AgentResult, EnvironmentSettings, Observation
from tailrace.errors import EnvironmentFailed, RolloutTimeout, SettingsError
from tailrace.records import Json, Message, Task
from tailrace.rollouts.agents import EnvironmentHost
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.messages import (
    LENGTH_BYTES,
    Call,
    Hello,
    Load,
    Open,
    ReadAttributes,
    Request,
    Score,
    ScoreNamed,
    Step,
    answer_decoder,
    pack,
)

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
        self._settings = settings
        self._environments = dict(environments)
        self._workers = [_Worker(settings, self._environments, log_path) for _ in range(settings.workers)]

    async def start(self, environments: Iterable[str]) -> None:
        """Start every worker now, and load these environments there, instead of with the first rollout."""
        names = list(environments)
        async with asyncio.TaskGroup() as starting:
            for worker in self._workers if names else []:
                starting.create_task(worker.start(names))

    async def reward(self, task: Task, messages: list[Message]) -> AgentResult:
        """What the reward function of the task's environment returns. Raises `RolloutError`."""
        async with self.least_busy(task.environment).process(task.environment) as process:
            value = await process.call(Score(task, messages), self._settings.worker_timeout_s, task)
        return AgentResult(**value)

    async def named_rewards(
        self, task: Task, conversations: Sequence[list[Message]], names: Sequence[str]
    ) -> Mapping[str, object]:
        """What these reward functions of the task's environment return, by name. Raises `RolloutError`."""
        call = ScoreNamed(task, list(conversations), list(names))
        async with self.least_busy(task.environment).process(task.environment) as process:
            returned: Mapping[str, object] = await process.call(call, self._settings.worker_timeout_s, task)
        return returned

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

    @property
    def timeout_s(self) -> float:
        """Seconds one call may take."""
        return self._settings.worker_timeout_s

    async def close(self) -> None:
        """End every worker; those that do not end by themselves are killed."""
        async with asyncio.TaskGroup() as closing:
            for worker in self._workers:
                closing.create_task(worker.close())


class WorkerEnvironment(EnvironmentHost):
    """One rollout's environment, living in a worker process."""

    _numbers = count()

    def __init__(self, pool: WorkerPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._worker = pool.least_busy(task.environment)
        self._worker.load += 1
        self._instance = next(self._numbers)
        self._home: _Process | None = None
        self._replies: list[Message] = []

    @override
    async def reset(self, task: Task) -> Observation:
        async with self._worker.process(task.environment) as process:
            return await self._open(process)

    @override
    async def step(self, reply: Message) -> Observation:
        value = await self._call(Step(self._instance, reply))
        self._replies.append(reply.copy())
        return Observation(**value)

    @override
    async def read_attributes(self, names: Sequence[str]) -> dict[str, Json]:
        values: dict[str, Json] = await self._call(ReadAttributes(self._instance, list(names)))
        return values

    @override
    async def close(self) -> None:
        self._worker.load -= 1
        if self._home is not None:
            self._home.to_close.append(self._instance)  # sent to the worker with its next call

    async def _call(self, call: Call) -> Json:
        async with self._worker.process(self._task.environment) as process:
            if process is not self._home:
                await self._open(process)
            return await process.call(call, self._pool.timeout_s, self._task)

    async def _open(self, process: _Process) -> Observation:
        """Reset in this process, and catch up with the replies so far."""
        limit_s = self._pool.timeout_s * (1 + len(self._replies))
        call = Open(self._instance, self._task, self._replies)
        value = await process.call(call, limit_s, self._task)
        self._home = process
        return Observation(**value)


class _Worker:
    """One slot of the pool: at most one process at a time, replaced when it is killed or dies."""

    def __init__(
        self, settings: RolloutSettings, environments: Mapping[str, EnvironmentSettings], log_path: Path | None
    ) -> None:
        self._settings = settings
        self._environments = environments
        self._log_path = log_path
        self._turn = asyncio.Lock()
        self._process: _Process | None = None
        self.load = 0
        """Environments living here, and calls waiting or running."""

    @asynccontextmanager
    async def process(self, environment: str) -> AsyncIterator[_Process]:
        """This worker's process for one caller at a time, with the environment loaded. Waits for its turn."""
        self.load += 1
        try:
            async with self._turn:
                process = await self._ready()
                await process.load(environment, self._settings.worker_start_timeout_s)
                yield process
        finally:
            self.load -= 1

    async def start(self, environments: Sequence[str]) -> None:
        """Start the process and load these environments."""
        for environment in environments:
            async with self.process(environment):
                pass

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.close()
            self._process = None

    async def _ready(self) -> _Process:
        if self._process is None or self._process.is_gone:
            self._process = await _Process.start(self._environments, self._log_path)
        return self._process


class _Process:
    """One worker process and its pipes. Calls must not overlap."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout
        self._loaded: set[str] = set()
        self._body_bytes: int | None = None
        self._is_killed = False
        self.to_close: list[int] = []
        """Environments to let go with the next call."""

    @property
    def is_gone(self) -> bool:
        """Killed, or ended by itself."""
        return self._is_killed or self._process.returncode is not None

    @classmethod
    async def start(cls, environments: Mapping[str, EnvironmentSettings], log_path: Path | None) -> _Process:
        """A fresh process, in a process group of its own, one thread for numerics."""
        log = None if log_path is None else log_path.open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tailrace.rollouts.workers.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            if log is not None:
                log.close()
        started = cls(process)
        settings = {name: chosen.model_dump_json() for name, chosen in environments.items()}
        started._requests.write(pack(Hello(sys.path, settings)))
        return started

    async def load(self, environment: str, limit_s: float) -> None:
        """Load an environment, once. Raises `EnvironmentFailed` when it cannot be loaded."""
        if environment not in self._loaded:
            await self._exchange(Load(environment), limit_s, f"loading environment {environment!r}")
            self._loaded.add(environment)

    async def call(self, call: Call, limit_s: float, task: Task) -> Json:
        """What user code returned.

        Raises:
            RolloutTimeout: It did not return in time; the process is killed.
            EnvironmentFailed: It raised, or ended the process.
        """
        return await self._exchange(call, limit_s, f"task {task.task_id}: {_NAMES[type(call)]}")

    async def _exchange(self, call: Call, limit_s: float, what: str) -> Json:
        try:
            async with asyncio.timeout(limit_s):
                self._send(call, what)
                answer = answer_decoder.decode(await self._read())
        except TimeoutError:
            self.kill()
            raise RolloutTimeout(
                f"{what} did not return within {limit_s:g} s (rollouts.worker_timeout_s); its worker process was killed"
            ) from None
        except asyncio.CancelledError:
            await self._finish_cancelled_call()
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            status = await self._process.wait()
            raise EnvironmentFailed(f"{what} ended its worker process (status {status})") from None
        if answer.failure is not None:
            raise EnvironmentFailed(f"{what} raised {answer.failure.error}\n{answer.failure.traceback}")
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

    async def _finish_cancelled_call(self) -> None:
        """Wait until a call whose caller was cancelled has returned, or end the process: nothing of it runs on."""
        try:
            async with asyncio.timeout(CANCELLED_CALL_S):
                await self._read()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            await self._process.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process group at once; whoever reads from the process sees the end of its pipe."""
        self._is_killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close the pipe, which ends an idle worker; kill what is left."""
        self._requests.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self.kill()


_NAMES: dict[type, str] = {
    Load: "loading",
    Open: "reset of the environment",
    Step: "step of the environment",
    ReadAttributes: "reading attributes of the environment",
    Score: "the reward function",
    ScoreNamed: "the reward functions",
}
