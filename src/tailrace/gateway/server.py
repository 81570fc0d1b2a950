"""uvicorn on the running event loop: no signals, no logging of its own, and clients that stop are cut off.

Beyond what uvicorn does itself, a connection is closed where the head of a request does not arrive in time (it may have
been opened and never used), and where what was sent is not read. A request that asks for another protocol is answered
in this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import TimerHandle
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tailrace.timeouts import timeout

_IDLE_S = 75
"""Seconds for which a connection is kept between two requests; longer than clients keep theirs."""
_BACKLOG = 4096
_TICK_S = 1.0
_NO_HTTP = "this is no HTTP request"


class _OneProtocol(HttpToolsProtocol):
    """A request that asks for another protocol is answered in this one."""

    @override
    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():  # else its head is read again
            super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    @override
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        unread = memoryview(data)
        try:
            while unread:
                unread = unread[self._read(unread) :]
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter of a CONNECT
            self.logger.warning(_NO_HTTP)
            self.send_400_response(_NO_HTTP)

    def _read(self, data: memoryview) -> int:
        """How many bytes were read: all, or the head of a request that asks for another protocol.

        The parser takes what follows such a head for that protocol. Nobody has to follow the wish (RFC 9110, 7.8),
        and clients of HTTP/2 utter it with each request, so the head is read again without: by another parser, since
        one that has read `Connection: close` reads nothing more.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)
            return int(upgrade.args[0])
        return len(data)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))


def connection_class(client_timeout_s: float) -> type[HttpToolsProtocol]:
    """Connections to clients that have so long to send a request's head, or to read on."""

    class Connection(_OneProtocol):
        """One client's."""

        _timer: TimerHandle | None = None

        @override
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._abort_later()

        @override
        def connection_lost(self, exc: Exception | None) -> None:
            self._keep()
            super().connection_lost(exc)

        @override
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._abort_later()

        @override
        def on_headers_complete(self) -> None:
            self._keep()
            super().on_headers_complete()

        @override
        def pause_writing(self) -> None:
            super().pause_writing()
            self._abort_later()

        @override
        def resume_writing(self) -> None:
            super().resume_writing()
            self._keep()

        @override
        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._abort_later()

        def _abort_later(self) -> None:
            self._keep()
            self._timer = self.loop.call_later(client_timeout_s, self.transport.abort)

        def _keep(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in, and ends when it is told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._closing = asyncio.Event()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @override
    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with timeout(_TICK_S):
                    await self._closing.wait()

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self.should_exit = True
        self._closing.set()


class HttpServer:
    """One application at one address."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, client_timeout_s: float, close_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(client_timeout_s),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=max(1, round(close_s)),
        )
        self._server, self._listener = _Server(config), listener
        self._serving: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        """Wait until it takes connections."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="gateway")
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait([self._serving, up], return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            self._serving.result()

    async def close(self) -> None:
        """Requests that still run are cancelled after a while."""
        if self._serving is not None:
            self._server.close()
            await self._serving
