"""Keeps the generators of a run: each is opened, used by the router until it fails, ended, and opened again.

    open ──→ serve ──→ failed: died, stuck, starved ──→ ended ──→ open ...

A generator that fails by itself before it ever served fails the run: its settings or its model are wrong, and would be
again. One that served, or was killed, is replaced, unless `generator.restart` is never or it ends too often
(`restarts`); the run goes on with the rest, and fails when none is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from tailrace.config import RunSettings
from tailrace.errors import LifecycleError, TailraceError
from tailrace.generation.router.router import Router
from tailrace.generation.rpc.client import ReportListener
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.lifecycle.restarts import EarlyEnd, RestartHistory
from tailrace.run.transports import ReplicaConnection

_logger = logging.getLogger(__name__)


class EndedReplica(NamedTuple):
    """Why one life of a generator ended."""

    reason: Exception
    """For people."""
    by_itself: bool
    """With an error of its own; else it was killed."""


class ReplicaSource(Protocol):
    """One generator of a run, over all its lives."""

    name: str
    """In logs, metrics and errors."""

    async def open(self, on_report: ReportListener) -> ReplicaConnection:
        """Start it, or connect to it; the engine need not be built yet. Raises `TailraceError`."""
        ...

    async def hello(self, client: ReplicaConnection) -> WelcomeReply:
        """Wait until it serves. Raises `TailraceError`."""
        ...

    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        """Make sure that nothing is left of it; why it failed."""
        ...

    async def close(self, client: ReplicaConnection) -> None:
        """The run is over: end it in order."""
        ...


class Generators:
    """All generators of a run; `router` uses them as one. Make it on a running event loop; it starts at once."""

    def __init__(
        self, settings: RunSettings, sources: Sequence[ReplicaSource], *, awaits_weights: bool = False
    ) -> None:
        """`awaits_weights`: whatever weights they hold, they take no request before the trainer's are installed."""
        self._settings = chosen = settings.generator
        never = {"per_role": 0} if chosen.restart == "never" else {}
        self._restarts = settings.restarts.model_copy(update=never)
        self.awaits_weights = awaits_weights
        self.router = Router(
            chosen.replica_names,
            chosen.router,
            chosen.weights,
            max_staleness=settings.max_staleness,
            awaits_weights=awaits_weights,
        )
        self._clients: dict[ReplicaSource, ReplicaConnection] = {}
        self._left = len(sources)
        self._fatal: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep(source), name=f"life of {source.name}") for source in sources]

    @property
    def engine_steps(self) -> int:
        """Of all that serve now, each since it started."""
        known = (replica.statistics for replica in self.router.replicas)
        return sum(statistics.steps_total for statistics in known if statistics is not None)

    async def watch(self) -> NoReturn:
        """Wait for what fails the run, and raise it."""
        await asyncio.shield(self._fatal)

    async def close(self) -> None:
        """End every generator in order. Closing twice does nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        clients, self._clients = self._clients, {}
        self.router.fail(LifecycleError("the run is over"))
        if self._fatal.done():
            self._fatal.exception()  # retrieved, so that asyncio does not log it where nobody watched
        await asyncio.gather(*(source.close(client) for source, client in clients.items()))

    async def _keep(self, source: ReplicaSource) -> None:
        """Waits for a generator to fail, and opens it again; ends when it is given up."""
        restarts, has_served = RestartHistory(self._restarts), False
        try:
            while True:
                (reason, by_itself), served = await self._live(source)
                has_served = has_served or served
                now_s = asyncio.get_running_loop().time()
                pause_s = restarts.next_pause_s(EarlyEnd(now_s, has_worked=has_served, by_itself=by_itself))
                if pause_s is None:
                    break
                _logger.warning("%s is started again: %s", source.name, reason)
                self.router.restarted(source.name)
                await asyncio.sleep(pause_s)
        except Exception as error:  # noqa: BLE001 - of any kind: it fails the run
            reason, has_served = error, False
        self._left -= 1
        if has_served and self._left:
            _logger.error("%s is given up, %d of the run's generators are left: %s", source.name, self._left, reason)
        else:
            self._fail(reason)

    def _fail(self, reason: Exception) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(reason)
        self.router.fail(reason)

    async def _live(self, source: ReplicaSource) -> tuple[EndedReplica, bool]:
        """One life: why it ended, and whether it ever served."""
        client, deadline_s, served = None, self._settings.router.start_deadline_s, False
        try:
            async with asyncio.timeout(deadline_s):
                client = self._clients[source] = await source.open(partial(self.router.report, source.name))
                welcome = await source.hello(client)
            served = True
            failure = await self.router.use(source.name, client, welcome.statistics)
        except TimeoutError:
            failure = LifecycleError(
                f"{source.name} did not serve within {deadline_s:g} s (generator.router.start_deadline_s)"
            )
        except TailraceError as error:
            failure, served = error, False
        if client is not None:
            client.fail(failure)
        ended = await source.end(client, failure)
        self._clients.pop(source, None)
        return ended, served
