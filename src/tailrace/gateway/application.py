"""What a request meets: its session, its dialect, its turn; and what it is answered.

An answer is whole, or events that begin once there is something to say (or a connection to keep), so that what is
refused before that is refused with a status.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from tailrace.config.gateway import GatewaySettings
from tailrace.gateway.asking import chat, continue_tokens
from tailrace.gateway.claims import read_claim
from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.protocol import (
    Answer,
    CountsTokens,
    Dialect,
    Failure,
    RequestInvalid,
    RequestT,
    Stream,
)
from tailrace.gateway.dialects.token_generation import TokenGeneration
from tailrace.gateway.http import (
    Headers,
    begin_events,
    headers_of,
    host_of,
    keys_of,
    read_json,
    repeatable,
    send_bytes,
    send_events,
    send_failure,
    send_json,
    send_nothing,
    watching,
)
from tailrace.gateway.offers import at_host
from tailrace.gateway.reports import read_report
from tailrace.gateway.routes import TOKEN_COUNTS, TURNS
from tailrace.gateway.sessions import Session, Sessions
from tailrace.gateway.tally import Tally
from tailrace.gateway.turns import Ask, Turn
from tailrace.records import Json
from tailrace.tracing.phases import phase

_PLAIN = ChatCompletions()
"""Says errors of routes that belong to no dialect."""


class GatewayContext:
    """What all routes share."""

    def __init__(self, sessions: Sessions, settings: GatewaySettings, tally: Tally, model: str = "policy") -> None:
        """`model` is what `/v1/models` calls the policy."""
        self.sessions, self.settings, self.tally, self.model = sessions, settings, tally, model
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


class _Exchange(ABC):
    """A route: what is wrong with a request is answered in its dialect."""

    def __init__(self, shared: GatewayContext, name: str, dialect: _SaysErrors) -> None:
        self._shared, self._name, self._says = shared, name, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        try:
            with phase("gateway"):
                status = await self._handle(scope, receive, send)
        except RequestInvalid as error:
            status = error.failure.status
            await send_failure(send, error.failure, self._says.error(error.failure))
        except ConnectionResetError:
            pass  # the client has gone before it had sent all
        finally:
            self._shared.tally.answered(self._name, status)

    @abstractmethod
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer it; the status, 0 where the client has gone. Raises `RequestInvalid` while nothing was sent yet."""


class _Turns(_Exchange, Generic[RequestT]):
    """Turns of a policy, in one dialect."""

    def __init__(
        self, shared: GatewayContext, dialect: Dialect[RequestT], ask: Callable[[Session, RequestT], Ask]
    ) -> None:
        """`ask` says how what is asked is sampled."""
        super().__init__(shared, dialect.name, dialect)
        self._dialect, self._ask = dialect, ask

    @override
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._shared.session(scope, headers)
        body, digest = await self._shared.body(scope, receive, headers)
        asks = repeatable(headers, digest)
        turn, request = session.turns.retried(asks), self._dialect.read(body)
        if turn is None:
            turn = session.turns.begin(session, self._ask(session, request), asks)
            self._shared.tally.began(turn)
        else:
            self._shared.tally.joined()
        with _waiting(turn, receive) as client:
            return await self._answer(client, request, send)

    async def _answer(self, client: _Client, request: RequestT, send: Send) -> int:
        if request.streams:
            turn = client.turn
            return await self._stream(client, self._dialect.events(request, turn.answer_id, turn.created_s), send)
        answer = await client.answer()
        if answer is None:
            return 0
        await send_json(send, self._dialect.whole(request, answer))
        client.was_sent_all()
        return 200

    async def _stream(self, client: _Client, events: Stream, send: Send) -> int:
        turn, keep_alive_s = client.turn, self._shared.settings.keep_alive_s
        if not turn.heard:
            await turn.changed(keep_alive_s)
        if isinstance(turn.outcome, Failure):
            raise RequestInvalid.of(turn.outcome)
        await begin_events(send)
        async for part in _parts(client, events, keep_alive_s):
            await send_events(send, part)
        if client.has_gone():
            return 0
        await send_events(send, b"", more=False)
        client.was_sent_all()
        return 200


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

    def was_sent_all(self) -> None:
        """The answer is on its way; where the connection broke meanwhile, it may be asked for again."""
        if not self._has_gone:
            self.turn.was_sent()

    async def answer(self) -> Answer | None:
        """Wait for it; None where the client has gone before. Raises `RequestInvalid` where there is none."""
        while self.turn.outcome is None:
            await self.turn.changed()
            if self.has_gone():
                return None
        if isinstance(self.turn.outcome, Failure):
            raise RequestInvalid.of(self.turn.outcome)
        return self.turn.outcome


async def _parts(client: _Client, events: Stream, keep_alive_s: float) -> AsyncIterator[bytes]:
    """The events of a turn as there is something to say, until it has ended or the client has gone."""
    turn, position = client.turn, 0
    pending = b"".join(events.begin())
    with _Silence(turn, keep_alive_s) as silence:
        while not client.has_gone():
            if position < len(turn.heard):
                heard = turn.heard[position:]
                position = len(turn.heard)
                pending += b"".join(events.more(heard))
            if turn.outcome is not None:
                end = events.end(turn.outcome) if isinstance(turn.outcome, Answer) else events.fail(turn.outcome)
                yield pending + b"".join(end)
                return
            if not pending and silence.is_long():
                pending = events.keep_alive()
            if pending:
                yield pending
                pending = b""
                silence.broken()
            else:
                await turn.changed()


class _Silence:
    """Wakes a turn where nothing was sent for a while: one timer, however often something is."""

    def __init__(self, turn: Turn, limit_s: float) -> None:
        self._turn, self._limit_s, self._loop = turn, limit_s, asyncio.get_running_loop()

    def __enter__(self) -> _Silence:
        self._timer = self._loop.call_later(self._limit_s, self._look)
        self.broken()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def broken(self) -> None:
        """Something was sent."""
        self._since_s = self._loop.time()

    def is_long(self) -> bool:
        """Whether nothing was sent for too long."""
        return self._loop.time() - self._since_s >= self._limit_s

    def _look(self) -> None:
        left_s = self._since_s + self._limit_s - self._loop.time()
        if left_s <= 0:
            self._turn.wake()
        self._timer = self._loop.call_later(left_s if left_s > 0 else self._limit_s, self._look)


@contextmanager
def _waiting(turn: Turn, receive: Receive) -> Iterator[_Client]:
    """Wait for a turn inside, for as long as the client is there."""
    client = _Client(turn)
    turn.join()
    try:
        with watching(receive, client.go):
            yield client
    finally:
        turn.leave()


class _Counts(_Exchange):
    """How many tokens a prompt has."""

    def __init__(self, shared: GatewayContext, name: str, dialect: CountsTokens) -> None:
        super().__init__(shared, name, dialect)
        self._dialect = dialect

    @override
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._shared.session(scope, headers)
        body, _ = await self._shared.body(scope, receive, headers)
        count = session.count_tokens(self._dialect.read_prompt(body))
        await send_json(send, self._dialect.counted(count))
        return 200


class _Report(_Exchange):
    """An agent says what it earned, or that it has ended."""

    def __init__(self, shared: GatewayContext, *, has_reward: bool) -> None:
        super().__init__(shared, "reward" if has_reward else "end", _PLAIN)
        self._has_reward = has_reward

    @override
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = headers_of(scope)
        session = self._shared.session(scope, headers)
        if self._has_reward:
            body, _ = await self._shared.body(scope, receive, headers)
            session.report(read_report(body))
        else:
            session.end()
        await send_json(send, {"status": "ended"})
        return 200


class _Claims(_Exchange):
    """A client outside asks for a rollout to play."""

    def __init__(self, shared: GatewayContext) -> None:
        super().__init__(shared, "claim", _PLAIN)

    @override
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers, offers = headers_of(scope), self._shared.sessions.offers
        offers.require_key(keys_of(headers))
        claim = read_claim((await self._shared.body(scope, receive, headers))[0])
        claiming = asyncio.ensure_future(offers.claim(claim))

        def give_up() -> None:
            claiming.cancel()

        try:
            with watching(receive, give_up):
                await asyncio.wait({claiming})
        finally:
            give_up()
        if claiming.cancelled():
            return 0
        if (rollout := claiming.result()) is None:
            await send_nothing(send)
            return 204
        if self._shared.settings.is_everywhere and (host := host_of(headers)):
            rollout = at_host(rollout, host)
        await send_bytes(send, rollout, b"application/json")
        return 200


class _Models(_Exchange):
    """The one model that there is."""

    def __init__(self, shared: GatewayContext) -> None:
        super().__init__(shared, "models", _PLAIN)

    @override
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> int:
        session, name = self._shared.session(scope, headers_of(scope)), self._shared.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "tailrace"}
        await send_json(send, {"object": "list", "data": [{**model, "max_model_len": session.max_model_tokens}]})
        return 200


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path} here; docs/gateway.md lists the routes"
    failure = Failure(status=error.status_code, message=message)
    return JSONResponse(_PLAIN.error(failure), status_code=error.status_code, headers=error.headers)


def application(shared: GatewayContext) -> ASGIApp:
    """Every route, as a server runs them."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text = shared.tally.prometheus(open_rollouts=len(shared.sessions))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    posts: list[tuple[str, ASGIApp]] = [(path, _Turns(shared, dialect, chat)) for path, dialect in TURNS]
    posts.append(("/inference/v1/generate", _Turns(shared, TokenGeneration(), continue_tokens)))
    posts += [(path, _Counts(shared, path.rpartition("/")[2], dialect)) for path, dialect in TOKEN_COUNTS]
    reports: list[tuple[str, ASGIApp]] = [
        ("/reward", _Report(shared, has_reward=True)),
        ("/end", _Report(shared, has_reward=False)),
    ]
    by_path = [(f"/rollouts/{{key}}{path}", app) for path, app in [*posts, *reports]]
    claims: list[tuple[str, ASGIApp]] = [("/rollouts", _Claims(shared))]
    routes: list[BaseRoute] = [Route(path, app, methods=["POST"]) for path, app in [*posts, *by_path, *claims]]
    models = _Models(shared)
    routes += [Route(path, models, methods=["GET"]) for path in ("/v1/models", "/rollouts/{key}/v1/models")]
    routes += [Route("/health", health, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
