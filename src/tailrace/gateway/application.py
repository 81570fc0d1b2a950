"""What a request meets: its session, its dialect, its turn; and what it is answered.

An answer is whole, or events that begin once there is something to say (or a connection to keep), so that what is
refused before that is refused with a status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.config.gateway import GatewaySettings
from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.protocol import (
    Answer,
    ChatRequest,
    CountsTokens,
    Dialect,
    Events,
    Failure,
    RequestInvalid,
)
from tailrace.gateway.http import (
    Headers,
    begin_events,
    headers_of,
    keys_of,
    read_json,
    repeatable,
    send_events,
    send_failure,
    send_json,
    watching,
)
from tailrace.gateway.reports import read_report
from tailrace.gateway.routes import TOKEN_COUNTS, TURNS
from tailrace.gateway.sessions import Session, Sessions
from tailrace.gateway.tally import Tally
from tailrace.gateway.turns import Turn
from tailrace.records import Json

_PLAIN = ChatCompletions()
"""Says errors of routes that belong to no dialect."""


class Hall:
    """What all routes share."""

    def __init__(self, sessions: Sessions, settings: GatewaySettings, tally: Tally) -> None:
        self.sessions, self.settings, self.tally = sessions, settings, tally
        self._max_bytes = int(settings.max_body_mb * 1e6)

    def session(self, scope: Scope, headers: Headers) -> Session:
        """Whose request it is. Raises `RequestInvalid`."""
        return self.sessions.find(scope["path_params"].get("key"), keys_of(headers))

    async def body(self, scope: Scope, receive: Receive, headers: Headers) -> tuple[dict[str, Json], bytes]:
        """Its body, and a digest. Raises as `read_json` does."""
        return await read_json(
            scope, receive, headers, max_bytes=self._max_bytes, timeout_s=self.settings.client_timeout_s
        )


class _SaysErrors(Protocol):
    def error(self, failure: Failure) -> dict[str, Json]: ...


class _Post:
    """A route that takes JSON: what is wrong with a request is answered in its dialect."""

    def __init__(self, hall: Hall, name: str, dialect: _SaysErrors) -> None:
        self._hall, self._name, self._says = hall, name, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            status = await self._handle(scope, receive, send)
        except RequestInvalid as error:
            status = error.failure.status
            await send_failure(send, error.failure, self._says.error(error.failure))
        except ConnectionResetError:
            status = 0  # the client has gone before it had sent all
        finally:
            self._hall.tally.answered(self._name, status)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer it; the status. Raises `RequestInvalid` while nothing was sent yet."""
        raise NotImplementedError


class _TurnRoute(_Post):
    """One turn of the policy."""

    def __init__(self, hall: Hall, dialect: Dialect) -> None:
        super().__init__(hall, dialect.name, dialect)
        self._dialect = dialect

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._hall.session(scope, headers)
        body, digest = await self._hall.body(scope, receive, headers)
        asks = repeatable(headers, digest)
        turn = session.turns.retried(asks)
        request = self._dialect.read(body)
        if turn is None:
            turn = session.turns.begin(session, request, asks)
            self._hall.tally.began(turn)
        else:
            self._hall.tally.joined()
        turn.join()
        client = _Client(turn)
        try:
            with watching(receive, client.go):
                if request.streams:
                    return await self._stream(
                        client, self._dialect.events(request, turn.answer_id, turn.created_s), send
                    )
                return await self._whole(client, request, send)
        finally:
            turn.leave()

    async def _whole(self, client: _Client, request: ChatRequest, send: Send) -> int:
        while client.turn.outcome is None and not client.has_gone():
            await client.turn.changed()
        if client.has_gone():
            return 0
        answer = _required(client.turn)
        await send_json(send, self._dialect.whole(request, answer))
        return 200

    async def _stream(self, client: _Client, events: Events, send: Send) -> int:
        turn, keep_alive_s = client.turn, self._hall.settings.keep_alive_s
        if not turn.text:
            await turn.changed(keep_alive_s)
        if isinstance(turn.outcome, Failure):
            raise RequestInvalid.of(turn.outcome)
        await begin_events(send)
        pending = b"".join(events.begin())
        position = 0
        while not client.has_gone():
            if position < len(turn.text):
                pending += b"".join(events.text("".join(turn.text[position:])))
                position = len(turn.text)
            elif turn.outcome is not None:
                end = events.end(turn.outcome) if isinstance(turn.outcome, Answer) else events.fail(turn.outcome)
                await send_events(send, pending + b"".join(end), more=False)
                return 200
            elif not pending:
                await turn.changed(keep_alive_s)
                if position == len(turn.text) and turn.outcome is None and not client.has_gone():
                    pending = events.keep_alive()
                continue
            if turn.outcome is None:
                await send_events(send, pending)
                pending = b""
        return 0


class _Client:
    """Whoever waits for a turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn, self._has_gone = turn, False

    def has_gone(self) -> bool:
        """Whether its connection is closed."""
        return self._has_gone

    def go(self) -> None:
        """Its connection is closed."""
        self._has_gone = True
        self.turn.wake()


class _CountRoute(_Post):
    """How many tokens a prompt has."""

    def __init__(self, hall: Hall, name: str, dialect: CountsTokens) -> None:
        super().__init__(hall, name, dialect)
        self._dialect = dialect

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._hall.session(scope, headers)
        body, _ = await self._hall.body(scope, receive, headers)
        count = session.count_tokens(self._dialect.read_prompt(body))
        await send_json(send, self._dialect.counted(count))
        return 200


class _ReportRoute(_Post):
    """An agent says what it earned, or that it has ended."""

    def __init__(self, hall: Hall, *, has_reward: bool) -> None:
        super().__init__(hall, "reward" if has_reward else "end", _PLAIN)
        self._has_reward = has_reward

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._hall.session(scope, headers)
        if self._has_reward:
            body, _ = await self._hall.body(scope, receive, headers)
            session.report(read_report(body))
        else:
            session.end()
        await send_json(send, {"status": "ended"})
        return 200


def _required(turn: Turn) -> Answer:
    """Its answer. Raises `RequestInvalid` where it failed."""
    if isinstance(turn.outcome, Answer):
        return turn.outcome
    assert turn.outcome is not None  # it has ended
    raise RequestInvalid.of(turn.outcome)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path} here; docs/gateway.md lists the routes"
    failure = Failure(status=error.status_code, message=message)
    return JSONResponse(_PLAIN.error(failure), status_code=error.status_code, headers=error.headers)


def application(hall: Hall, more: Mapping[str, ASGIApp] | None = None) -> ASGIApp:
    """Every route, as a server runs them. `more` are those without a rollout, by their paths."""
    posts: list[tuple[str, ASGIApp]] = [(path, _TurnRoute(hall, dialect)) for path, dialect in TURNS]
    posts += [(path, _CountRoute(hall, path.rpartition("/")[2], dialect)) for path, dialect in TOKEN_COUNTS]
    reports: list[tuple[str, ASGIApp]] = [
        ("/reward", _ReportRoute(hall, has_reward=True)),
        ("/end", _ReportRoute(hall, has_reward=False)),
    ]
    by_path = [(f"/rollouts/{{key}}{path}", app) for path, app in [*posts, *reports]]
    routes: list[BaseRoute] = [Route(path, app, methods=["POST"]) for path, app in [*posts, *by_path]]
    routes += [Route(path, app, methods=["GET"]) for path, app in (more or {}).items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
