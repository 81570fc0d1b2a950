"""The gateway of one process: its server, and the endpoints of the rollouts that are played there."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import Endpoint, Offer
from tailrace.environments.outside import AnswerClient
from tailrace.errors import SettingsError
from tailrace.extras import extra_needed
from tailrace.gateway.fixed import FixedPolicy
from tailrace.gateway.offers import Offers
from tailrace.gateway.sessions import Sessions
from tailrace.gateway.tally import Tally
from tailrace.lifecycle.open_files import raise_file_limit
from tailrace.records import Json, SamplingParams
from tailrace.rollouts import Endpoints, RolloutPolicy
from tailrace.rollouts.endpoints import EndpointsEntry

if TYPE_CHECKING:
    from tailrace.gateway.server import HttpServer

CLOSE_S = 5.0
"""Seconds in which requests that still run may end when the gateway is closed."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def require_free_ports(settings: GatewaySettings, agent_workers: int = 0) -> None:
    """Raise `SettingsError` where a port of its own is another's, before anything is started that would need it.

    Or one of those after it, of so many agent workers on this machine.
    """
    for worker in range(1 + agent_workers) if settings.port else ():
        _listener(settings, after=worker).close()


class Gateway(Endpoints):
    """HTTP endpoints for rollouts' policies, served on the running event loop. Close it, or use it as a context.

    It listens from when the first endpoint is opened, or with a port of its own from `start` on.
    """

    def __init__(
        self,
        settings: GatewaySettings | None = None,
        *,
        model: str = "policy",
        secret: bytes = b"",
        from_start: bool = True,
    ) -> None:
        """`model` is what `/v1/models` calls the policy, `secret` as `Sessions` takes it. Unless it listens
        `from_start`, its port may be another's for as long as no rollout needs it.
        """
        self.settings, self._model, self._from_start = settings or GatewaySettings(), model, from_start
        self.tally = Tally()
        self.sessions = Sessions(self.settings, secret)
        self._starting: asyncio.Task[HttpServer] | None = None
        self._root_url = ""
        self._context = contextvars.copy_context()
        """Requests are handled in it: what they take is no rollout's."""

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def offers(self) -> Offers:
        """Rollouts that wait for clients outside."""
        return self.sessions.offers

    @property
    def root_url(self) -> str:
        """Where this machine reaches it; empty until it listens."""
        return self._root_url

    @property
    def public_url(self) -> str:
        """The same with this machine's name, for other machines, where it listens at all of its addresses."""
        if not self.settings.is_everywhere:
            return self._root_url
        return self._root_url.replace(_LOOPBACK[self.settings.host], socket.gethostname())

    @override
    def entry(self, worker: int) -> EndpointsEntry:
        port = self.settings.port and self.settings.port + 1 + worker
        settings = {**self.settings.model_dump(mode="json"), "port": port}
        made_of = _MadeOf(settings, self._model, self.sessions.secret, self._from_start)
        return EndpointsEntry(f"{__name__}:make_gateway", msgspec.json.encode(made_of).decode())

    @override
    @contextlib.asynccontextmanager
    async def claimed(self, offer: Offer) -> AsyncIterator[AnswerClient]:
        await self.listen()
        async with self.offers.claimed(offer) as tell:
            yield tell

    @override
    async def start(self) -> None:
        if self.settings.port and self._from_start:
            await self.listen()

    async def listen(self) -> None:
        """Take requests, where it does not yet. Raises `SettingsError` where the address cannot be had."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._listening(), context=self._context)
        await asyncio.shield(self._starting)  # a rollout that is cancelled leaves it to the others

    @override
    async def close(self) -> None:
        self.offers.close()
        for session in self.sessions:
            self.sessions.close(session)
        if self._starting is not None:
            with contextlib.suppress(SettingsError):  # it never listened
                await (await self._starting).close()

    @override
    @contextlib.asynccontextmanager
    async def open(self, policy: RolloutPolicy) -> AsyncIterator[Endpoint]:
        await self.listen()
        session = self.sessions.open(policy, self._root_url)
        self.tally.sessions += 1
        try:
            yield session
        except Exception as error:
            if session.engine_failure is not None:
                raise session.engine_failure from error
            raise
        finally:
            self.sessions.close(session)
            await session.turns.ended()
        if session.engine_failure is not None:
            raise session.engine_failure

    async def serve(self, key: str, new_policy: Callable[[SamplingParams], RolloutPolicy]) -> None:
        """Answer whoever has the `key`, each request by a policy of its own, until it is closed."""
        await self.listen()
        self.sessions.add(FixedPolicy(key, self._root_url, self.settings, new_policy))

    async def _listening(self) -> HttpServer:
        settings = self.settings
        try:
            from tailrace.gateway.application import GatewayContext, application
            from tailrace.gateway.server import HttpServer
        except ModuleNotFoundError as error:
            raise SettingsError(extra_needed("HTTP for agents", error.name, "gateway")) from error
        raise_file_limit()
        listener = _listener(settings)
        host = _LOOPBACK.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
        self._root_url = f"http://{host}:{listener.getsockname()[1]}"
        shared = GatewayContext(self.sessions, settings, self.tally, self._model)
        server = HttpServer(application(shared), listener, client_timeout_s=settings.client_timeout_s, close_s=CLOSE_S)
        await server.start()
        return server


class _MadeOf(msgspec.Struct, frozen=True):
    settings: dict[str, Json]
    model: str
    secret: bytes
    from_start: bool


def make_gateway(made_of: str) -> Gateway:
    """A gateway of an agent worker, as `Gateway.entry` says."""
    given = msgspec.json.decode(made_of, type=_MadeOf)
    settings = GatewaySettings.model_validate(given.settings)
    return Gateway(settings, model=given.model, secret=given.secret, from_start=given.from_start)


def _listener(settings: GatewaySettings, *, after: int = 0) -> socket.socket:
    """At the port of the settings, or so many after it, where an agent worker's is."""
    address = (settings.host, settings.port + after)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    is_dual = settings.host == "::" and socket.has_dualstack_ipv6()  # a machine's name may mean its IPv4 address alone
    try:
        return socket.create_server(address, family=family, backlog=4096, dualstack_ipv6=is_dual)
    except OSError as error:
        where = f"at {address[1]}, as agent worker {after} has to" if after else "there"
        raise SettingsError(
            f"gateway.host = {settings.host!r}, gateway.port = {settings.port}: cannot listen {where} "
            f"({error.strerror or error}); choose another address, or port 0 for a free one"
        ) from error
