"""An OpenEnv server: reached under a URL, or started for a package; and sessions with it.

WS /ws     {"type": "reset" | "step" | "close", "data": {...}}  ─►  {"type": "observation" | "error", "data": {...}}
HTTP       POST /reset, POST /step: a fallback for servers without `/ws`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

from tailrace.cancelling import cancelled
from tailrace.child_processes import kill_group
from tailrace.environments.adapters.servers import ErrorOutput
from tailrace.environments.adapters.shared_attempt import SharedAttempt
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.extras import import_extra
from tailrace.records import Json
from tailrace.timeouts import timeout

if TYPE_CHECKING:
    import httpx

_MAX_MESSAGE_BYTES = 64 << 20
_FULL_PAUSE_S = (0.05, 1.0)
"""Between attempts to get a session of a server that is full: nothing tells when others leave it."""
_HUNG_S = 10.0
"""In which a server that left a request without an answer must at least say that it is there."""
_READ_OUT_S = 2.0
"""For what a server had written; another process may hold its pipe for ever."""
_NO_WEBSOCKET = (403, 404, 405, 426)
"""How servers without `/ws` answer a handshake; of others (401, 503, ...) a server that has it may be behind."""
_UVICORN = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
sys.argv[0] = "uvicorn"
runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)
"""
"""`python -m uvicorn`, which ends when our end of its input is closed, with us at the latest."""

Transport = Literal["auto", "websocket", "http"]


class InvalidAction(Exception):
    """The server refused an action by its schema: the policy may read why."""


class _Full(Exception):
    """No session is free."""


class Session(Protocol):
    """One environment of a server."""

    async def reset(self, data: Mapping[str, Json]) -> dict[str, Json]:
        """The first observation, with `reward` and `done` beside it."""

    async def step(self, action: Mapping[str, Json]) -> dict[str, Json]:
        """What an action led to. Raises `InvalidAction`."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer:
    """Where an OpenEnv server is. Give a `url`, or a `package` to start it from.

    Raises `SettingsError` where both or neither are given, or an extra is missing.
    """

    url: str | None = None
    package: str | None = None
    """Its server is started as `PYTHON -m uvicorn PACKAGE.server.app:app`, once per process, on a port of its own."""
    python: str = sys.executable
    """The interpreter to start it with: of an environment of its own where OpenEnv is installed in another one."""
    cwd: str | None = None
    """The folder to start it in."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request, as they are given."""
    transport: Transport = "auto"
    start_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    _running: _Running = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.url is None) == (self.package is None):
            raise SettingsError("an OpenEnv server has either a `url` or a `package`")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https", "ws", "wss"):
            raise SettingsError(f"the url of an OpenEnv server is {self.url!r}; it begins with http:// or https://")
        if min(self.start_timeout_s, self.step_timeout_s) <= 0:
            raise SettingsError("the limits of an OpenEnv server must be above 0")
        if self.transport != "http":
            import_extra("websockets", extra="openenv", what="OpenEnv")
        object.__setattr__(self, "_running", _Running(self))

    def __str__(self) -> str:
        return f"the OpenEnv server {self.url or self.package}"

    async def schema(self) -> dict[str, Json]:
        """Its schemas of actions and observations. Raises `EnvironmentFailed`."""
        base = await self._running.base_url()
        async with self._http(base) as client:
            answer = await _answer(self, client.get("/schema"))
        return answer

    @asynccontextmanager
    async def session(self, reset: Mapping[str, Json]) -> AsyncIterator[tuple[Session, dict[str, Json]]]:
        """A session of its own that was reset with this, and its first observation.

        Waits while the server is full with other sessions of this process. Raises `EnvironmentFailed`.
        """
        async with contextlib.AsyncExitStack() as stack:
            session, first = await self._running.enter(stack, reset)
            yield session, first

    async def close(self) -> None:
        """End the server, where it was started here."""
        await self._running.close()

    def failed(self, what: str) -> EnvironmentFailed:
        """An error that names the server, with what it wrote last."""
        return EnvironmentFailed(f"{self} {what}{self._running.described()}")

    async def unanswered(self, what: str) -> EnvironmentFailed:
        """As `failed`, of a request without an answer: a server that was started here and hangs is ended."""
        await self._running.end_if_hung()
        return self.failed(what)

    def _http(self, base: str) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            base_url=base, headers=dict(self.headers), timeout=self.step_timeout_s, trust_env=not _is_here(base)
        )


class _Running:
    """The server of one process: started where it has to be, and how its sessions are had."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: _Started | None = None
        self._output = ErrorOutput()
        self._by_http = server.transport == "http"
        self._open = 0

    async def base_url(self) -> str:
        """Of the server, which is started first where it has to be."""
        if self._loop is not asyncio.get_running_loop():  # what another one had, ended with it
            self._loop, self._started, self._open = asyncio.get_running_loop(), None, 0
            self._starting, self._looking = SharedAttempt(self._start), SharedAttempt(self._look)
            self._left = asyncio.Event()
        if self._server.url is not None:
            return _with_scheme(self._server.url, "http")
        started = self._started
        if started is None or started.process.returncode is not None:
            started = await self._starting.result()
        return started.base

    def described(self) -> str:
        said = self._output.said
        return f" (it wrote: {said})" if said else ""

    async def enter(
        self, stack: contextlib.AsyncExitStack, reset: Mapping[str, Json]
    ) -> tuple[Session, dict[str, Json]]:
        pause_s, waited_s = _FULL_PAUSE_S[0], 0.0
        while True:
            async with contextlib.AsyncExitStack() as attempt:
                try:
                    session = await self._connect(attempt)
                    first = await session.reset(reset)
                except _Full as error:
                    if waited_s > self._server.start_timeout_s:
                        raise self._server.failed(f"has no free session: {error}") from error
                except InvalidAction as error:
                    raise self._server.failed(f"refused a reset: {error}") from error
                else:
                    self._open += 1
                    stack.callback(self._leave)
                    await stack.enter_async_context(attempt.pop_all())
                    return session, first
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with timeout(pause_s):
                    await self._left.wait()
            waited_s = 0.0 if self._open else waited_s + pause_s
            pause_s = min(2 * pause_s, _FULL_PAUSE_S[1])

    def _leave(self) -> None:
        self._open -= 1
        self._left.set()

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Session:
        base = await self.base_url()
        if not self._by_http:
            from websockets.asyncio.client import connect
            from websockets.exceptions import InvalidHandshake, InvalidStatus

            try:
                socket_ = await stack.enter_async_context(
                    connect(
                        _with_scheme(base, "ws") + "/ws",
                        open_timeout=self._server.start_timeout_s,
                        ping_timeout=None,  # a server may be busy for the whole of step_timeout_s
                        max_size=_MAX_MESSAGE_BYTES,
                        additional_headers=dict(self._server.headers),
                        proxy=None if _is_here(base) else True,
                    )
                )
                return _WebSocketSession(self._server, socket_)
            except InvalidStatus as error:
                lacks_it = error.response.status_code in _NO_WEBSOCKET
                if not lacks_it or self._server.transport == "websocket":
                    what = "has no WebSocket" if lacks_it else "opened no WebSocket, though it may have one"
                    raise self._server.failed(f"{what}: {error}") from error
                self._by_http = True
            except TimeoutError as error:
                raise await self._server.unanswered(f"cannot be reached: {error}") from error
            except OSError as error:
                raise self._server.failed(f"cannot be reached: {error}") from error
            except InvalidHandshake as error:
                raise self._server.failed(f"opened no WebSocket: {error}") from error
        client = await stack.enter_async_context(self._server._http(base))
        return _HttpSession(self._server, client)

    async def _start(self) -> _Started:
        """Start the package's server on a socket that is bound already: connections wait until it is up."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            descriptor = listening.fileno()
            process = await asyncio.create_subprocess_exec(
                self._server.python,
                *("-c", _UVICORN, f"{self._server.package}.server.app:app", "--fd", str(descriptor)),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                cwd=self._server.cwd,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        tasks = [asyncio.create_task(self._output.listen(process)), asyncio.create_task(self._hold(process))]
        started, limit_s, is_up = _Started(process, base, tasks), self._server.start_timeout_s, False
        try:
            is_up = await self._answers(started, limit_s)
        finally:
            if not is_up:  # or the rollouts that wait here were cancelled: the next one starts another server
                await started.end()
        if not is_up:
            raise self._server.failed(f"did not come up within {limit_s:g} s, or ended before")
        self._started = started
        return started

    async def _answers(self, started: _Started, limit_s: float) -> bool:
        """Whether it does, within this time and before it ends."""
        async with self._server._http(started.base) as client:
            health = asyncio.ensure_future(client.get("/health", timeout=limit_s))
            ended = asyncio.ensure_future(started.process.wait())
            try:
                await asyncio.wait({health, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancelled(health, ended)
            return not health.cancelled() and health.exception() is None

    async def end_if_hung(self) -> None:
        """Where it answers nothing at all; the next session starts another one."""
        if self._started is not None:
            await self._looking.result()

    async def _look(self) -> None:
        started = self._started
        if started is not None and not await self._answers(started, _HUNG_S) and started is self._started:
            await self.close()

    async def close(self) -> None:
        started, self._started = self._started, None
        if started is not None and self._loop is asyncio.get_running_loop():
            await started.end()

    async def _hold(self, process: Process) -> None:
        """End the server with the event loop, which cancels its tasks when it ends."""
        try:
            await process.wait()
        finally:
            kill_group(process.pid)


@dataclass(frozen=True)
class _Started:
    """A server that was started here."""

    process: Process
    base: str
    """Its URL."""
    tasks: list[asyncio.Task[None]]
    """They listen to it, and end it with the event loop."""

    async def end(self) -> None:
        kill_group(self.process.pid)
        await self.process.wait()
        await asyncio.wait(self.tasks, timeout=_READ_OUT_S)
        for task in self.tasks:
            task.cancel()


class _WebSocketSession:
    """One connection, which is one environment."""

    def __init__(self, server: OpenEnvServer, socket_: Any) -> None:
        self._server, self._socket = server, socket_

    async def reset(self, data: Mapping[str, Json]) -> dict[str, Json]:
        return await self._ask("reset", data)

    async def step(self, action: Mapping[str, Json]) -> dict[str, Json]:
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Json]) -> dict[str, Json]:
        from websockets.exceptions import ConnectionClosed

        limit_s = self._server.step_timeout_s
        try:
            async with timeout(limit_s):
                with contextlib.suppress(ConnectionClosed):  # it may have said why before it closed
                    await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise await self._server.unanswered(f"did not answer a {kind} within {limit_s:g} s") from None
        except ConnectionClosed as error:
            raise self._server.failed(f"closed the connection in a {kind}: {error}") from error
        except ValueError as error:
            raise self._server.failed(f"answered a {kind} with what is no JSON: {error}") from error
        return self._observation(kind, answer)

    def _observation(self, kind: str, answer: Any) -> dict[str, Json]:
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise self._server.failed(f"answered a {kind} with {answer!r:.200}")
        if answer.get("type") != "error":
            return data
        said, code = str(data.get("message", data)), data.get("code")
        if code == "CAPACITY_REACHED":
            raise _Full(said)
        if code == "VALIDATION_ERROR":
            raise InvalidAction(said)
        raise self._server.failed(f"failed in a {kind}: {said}")


class _HttpSession:
    """A server without `/ws`. Where each request meets an environment of its own, only the first step makes sense."""

    def __init__(self, server: OpenEnvServer, client: httpx.AsyncClient) -> None:
        self._server, self._client = server, client

    async def reset(self, data: Mapping[str, Json]) -> dict[str, Json]:
        return await _answer(self._server, self._client.post("/reset", json=dict(data)))

    async def step(self, action: Mapping[str, Json]) -> dict[str, Json]:
        return await _answer(self._server, self._client.post("/step", json={"action": dict(action)}))


async def _answer(server: OpenEnvServer, asking: Any) -> dict[str, Json]:
    """The JSON object of an answer over HTTP."""
    import httpx

    try:
        answer = await asking
        if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise InvalidAction(answer.text)
        answer.raise_for_status()
        found = answer.json()
    except httpx.TimeoutException as error:
        raise await server.unanswered(f"cannot be asked: {type(error).__name__}: {error}") from error
    except (httpx.HTTPError, ValueError) as error:
        raise server.failed(f"cannot be asked: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise server.failed(f"answered with {found!r:.200}")
    return found


def _with_scheme(url: str, scheme: Literal["http", "ws"]) -> str:
    """The URL for HTTP or for a WebSocket, as secure as it was.

    >>> _with_scheme("https://example.org/env/", "ws"), _with_scheme("ws://127.0.0.1:80", "http")
    ('wss://example.org/env', 'http://127.0.0.1:80')
    """
    parts = urlsplit(url)
    secure = "s" if parts.scheme in ("https", "wss") else ""
    return urlunsplit(parts._replace(scheme=scheme + secure)).rstrip("/")


def _is_here(url: str) -> bool:
    """Whether it is on this machine, where no proxy stands between."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
