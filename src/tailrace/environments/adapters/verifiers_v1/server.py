"""verifiers 0.4's own environment server, as a child process of the one that plays: started for the first rollout,
watched, started again where it ended, and ended with the run, together with all that it started.

    VerifiersServer.tasks ─► python host.py describe ─► rows, or why not
    VerifiersServer.play  ─► python host.py serve ◄─ZMQ─► Episode ─► Trace
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tailrace.child_processes import describe_exit
from tailrace.environments.adapters.verifiers_v1 import wire
from tailrace.environments.programs.host import ProgramHost, hosted
from tailrace.environments.programs.process import Program, ProgramLimits
from tailrace.errors import EnvironmentFailed, ProgramFailed, SettingsError
from tailrace.records import Json
from tailrace.timeouts import timeout

HOST = Path(__file__).with_name("host.py")
_DESCRIBE_S = 600.0
"""For an environment to load its tasks, which it may have to fetch."""
_END_S = 10.0
"""That the server has to end by itself, and to remove what its rollouts left; then all that it started is killed."""
_SHOWN_CHARACTERS = 2_000
_LIMITS = ProgramLimits(output_bytes=sys.maxsize, processes=sys.maxsize)
_SOCKETS = "/tmp"
"""The path of a socket has 107 characters at most, and TMPDIR may be long."""

_Hear = Callable[[bytes], None]
"""What takes the deltas of a request."""


@dataclass(frozen=True, kw_only=True)
class VerifiersServer:
    """One environment of verifiers 0.4, by its settings."""

    python: Path
    """An interpreter that has verifiers 0.4 and the environment's package."""
    env: Mapping[str, Json]
    """verifiers' `[env]` block."""
    path: Path | None = None
    """Where the environment's package is, if it is not installed."""
    max_tasks: int | None = None
    concurrency: int = 16
    """Rollouts at once; the others wait."""
    start_timeout_s: float = 120.0
    _running: _Running = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_running", _Running(self))

    def __str__(self) -> str:
        taskset = self.env["taskset"]
        return f"the environment {taskset['id'] if isinstance(taskset, dict) else taskset} of verifiers"

    @cached_property
    def tasks(self) -> list[dict[str, Json]]:
        """Its tasks, as it is given them again. Raises `SettingsError` for what cannot be trained on, with the reason.

        Starts a process that ends when it has told them.
        """
        with tempfile.TemporaryDirectory(prefix="tailrace-verifiers-") as folder:
            answer = Path(folder) / "answer.json"
            try:
                ended = subprocess.run(
                    self.command("describe", str(answer)),
                    input=json.dumps(self.request),
                    env=self.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=_DESCRIBE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise SettingsError(f"{self} told no tasks within {_DESCRIBE_S:g} s") from None
            except OSError as error:
                raise SettingsError(f"{self.python} cannot be started: {error.strerror}") from error
            if not answer.exists():
                said = ended.stdout.strip()[-_SHOWN_CHARACTERS:]
                how = describe_exit(ended.returncode)
                raise SettingsError(f"{self}: the process that was to tell its tasks ended {how}; it wrote: {said}")
            described = json.loads(answer.read_text())
        if "error" in described:
            raise SettingsError(f"{self}: {described['error']}")
        if not described["version"].startswith("0.4."):
            raise SettingsError(f"{self.python} has verifiers {described['version']}; this needs 0.4")
        if not described["tasks"]:
            raise SettingsError(f"{self} has no task")
        tasks: list[dict[str, Json]] = described["tasks"]
        return tasks

    async def play(self, task: Mapping[str, Json], client: Mapping[str, Json]) -> wire.Trace:
        """One rollout of a task, whose policy answers where `client`, in verifiers' form, says.

        Raises `EnvironmentFailed` where the rollout fails, or the server. A rollout that is cancelled is cancelled
        there, too.
        """
        return await self._running.play(wire.run_request(task, client))

    async def close(self) -> None:
        """End the server."""
        await self._running.close()

    @property
    def request(self) -> dict[str, Any]:
        """What `host.py` reads."""
        return {"env": self.env, "max_tasks": self.max_tasks, "concurrency": self.concurrency}

    def command(self, *arguments: str) -> list[str]:
        """To run `host.py`. Without its folder among the modules' (-P): there is a `verifiers` beside it."""
        return [str(self.python), "-P", str(HOST), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process, which what it starts inherits."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        direct = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), "127.0.0.1", "localhost"]))
        kept |= {"NO_PROXY": direct, "no_proxy": direct, "TOKENIZERS_PARALLELISM": "false"}
        return kept if self.path is None else {**kept, "PYTHONPATH": str(self.path)}


class _Running:
    """The server of one process, while it runs."""

    def __init__(self, server: VerifiersServer) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up: _Up | None = None

    async def play(self, request: bytes) -> wire.Trace:
        loop = asyncio.get_running_loop()
        if self._up is None or self._up.has_ended or self._loop is not loop:  # what another loop had, ended with it
            self._loop, self._up = loop, _Up(self._server)
        up = self._up
        await up.answers()
        return await up.play(request)

    async def close(self) -> None:
        up, self._up = self._up, None
        if up is not None and self._loop is asyncio.get_running_loop():
            await up.close()


class _Up:
    """A server, from its start to its end: a task, so that it ends with its event loop at the latest."""

    def __init__(self, server: VerifiersServer) -> None:
        self._server = server
        self._waiting: dict[bytes, tuple[asyncio.Future[bytes], _Hear]] = {}
        self._closing = asyncio.Event()
        self._gone = False
        """Its process has ended, or is being ended."""
        self._answers: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.add_done_callback(lambda one: one.cancelled() or one.exception())  # perhaps nobody waits for it
        self._life = asyncio.create_task(self._live(), name=str(server))

    @property
    def has_ended(self) -> bool:
        """Whether it plays no rollout any more."""
        return self._gone or self._life.done()

    async def answers(self) -> None:
        """Wait until it does. Raises `EnvironmentFailed` where it does not come up."""
        await asyncio.shield(self._answers)

    async def close(self) -> None:
        """End it, and all that it started."""
        self._closing.set()
        if not self._answers.done():
            self._life.cancel()
        await asyncio.wait({self._life})

    async def _live(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._start(stack)
                self._answers.set_result(None)
                closing = asyncio.create_task(self._closing.wait())
                await asyncio.wait({self._watching, closing}, return_when=asyncio.FIRST_COMPLETED)
                closing.cancel()
        except (EnvironmentFailed, OSError, zmq.ZMQError) as error:
            if not self._answers.done():
                self._answers.set_exception(EnvironmentFailed(str(error)))
        finally:
            if not self._answers.done():
                self._answers.set_exception(EnvironmentFailed(f"{self._server} was ended before it answered"))

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start it, and wait until it answers. Raises `EnvironmentFailed`."""
        host = await stack.enter_async_context(hosted())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-", dir=_SOCKETS))
        address = f"ipc://{folder}/verifiers"
        self._program = _program(self._server, host, Path(folder), address)
        stack.push_async_callback(self._program.close)
        context = stack.enter_context(zmq.asyncio.Context())
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self._server}")
        self._receiving = asyncio.create_task(self._receive(), name=f"hear {self._server}")
        stack.push_async_callback(self._stop)
        limit_s = self._server.start_timeout_s
        try:
            async with timeout(limit_s):
                await self._ask(wire.HEALTH, b"\x80", lambda _: None)
        except TimeoutError:
            raise self._failed(f"did not answer within {limit_s:g} s of its start") from None

    async def play(self, request: bytes) -> wire.Trace:
        episode = wire.Episode()
        return episode.finished(await self._ask(wire.RUN, request, episode.hear))

    async def _ask(self, method: bytes, request: bytes, hear: _Hear) -> bytes:
        """The reply to a request. Raises `EnvironmentFailed` where the server ends before."""
        if self._gone:
            raise self._failed("has ended")
        request_id = uuid.uuid4().hex.encode()
        reply = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = reply, hear
        try:
            await self._socket.send_multipart([request_id, method, request])
            answer: bytes = await reply
            return answer
        except asyncio.CancelledError:
            if method == wire.RUN:
                self._cancel(request_id)
            raise
        finally:
            del self._waiting[request_id]

    def _cancel(self, request_id: bytes) -> None:
        """Have it end a rollout. Nobody waits for the answer."""
        with contextlib.suppress(zmq.ZMQError):  # it is being ended itself; it is sent at once otherwise
            self._socket.send_multipart([uuid.uuid4().hex.encode(), wire.CANCEL, wire.cancel_request(request_id)])

    async def _receive(self) -> None:
        while True:
            request_id, kind, data = await self._socket.recv_multipart()
            waiting = self._waiting.get(request_id)
            if waiting is None or waiting[0].done():
                continue  # of one that was cancelled
            reply, hear = waiting
            try:
                if kind == wire.DELTA:
                    hear(data)
                else:
                    reply.set_result(data)
            except EnvironmentFailed as error:
                reply.set_exception(error)

    async def _watch(self) -> None:
        """Fail what waits for an answer once its process has ended."""
        how = "was ended"
        try:
            how = f"ended {describe_exit(await self._program.ended())}"
        except ProgramFailed as error:
            how = f"was ended: {error}"
        finally:
            self._gone = True
            for reply, _ in self._waiting.values():
                if not reply.done():
                    reply.set_exception(self._failed(how))

    async def _stop(self) -> None:
        """Let it end by itself, where it can."""
        self._program.ask_to_end()
        await asyncio.wait({self._watching}, timeout=_END_S)
        self._receiving.cancel()
        self._watching.cancel()
        await asyncio.wait({self._receiving, self._watching})
        self._socket.close()

    def _failed(self, how: str) -> EnvironmentFailed:
        said = self._program.output.strip()[-_SHOWN_CHARACTERS:]
        return EnvironmentFailed(f"the server of {self._server} {how}" + (f"; it wrote: {said}" if said else ""))


def _program(server: VerifiersServer, host: ProgramHost, folder: Path, address: str) -> Program:
    """The process. Raises `ProgramFailed` where the system does not start it."""
    request = folder / "request.json"
    request.write_text(json.dumps(server.request))
    return Program(
        host,
        host.new_number(),
        server.command("serve", address),
        folder=Path.cwd(),
        environment=server.environment,
        standard_input=request,
        limits=_LIMITS,
    )
