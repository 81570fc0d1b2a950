"""Keeps the generators of a run: each is opened, used by the router until it fails, ended, and opened again.

    own     open ──→ serve ──→ failed: died, stuck, starved ──→ ended ──→ open, where fewer than `min` are there ...
    guest   asks to join ──→ open ──→ serve ──→ failed, or released ──→ ended

A generator that fails by itself before it ever served fails the run: its settings or its model are wrong, and would be
again; a guest that does is sent away. One that served, or was killed, is replaced, unless `generator.restart` is never
or it ends too often (`restarts`); the run goes on with the rest, and fails when none is left. Who may join, and what is
started, the pool decides (`replica_pool`), and on a cluster how many there are to be `replica_scaling`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from tailrace.cancelling import cancelled
from tailrace.config import RunSettings
from tailrace.errors import ClusterFull, LifecycleError, ReplicaReleased, TailraceError
from tailrace.generation.router.replica import Replica
from tailrace.generation.router.router import Router
from tailrace.generation.rpc.client import ReportListener
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.lifecycle.restarts import EarlyEnd, RestartHistory
from tailrace.run.replica_pool import Place, ReplicaPool, Standing
from tailrace.run.replica_scaling import LOOK_S, Load, ReplicaScaling
from tailrace.run.transports import ReplicaConnection
from tailrace.timeouts import timeout
from tailrace.transport.channels import wait_until

_logger = logging.getLogger(__name__)


class EndedReplica(NamedTuple):
    """Why one life of a generator ended."""

    reason: Exception
    """For people."""
    by_itself: bool
    """With an error of its own; else it was killed."""
    is_held: bool = False
    """The system holds what is left of it: it cannot be started again."""


class ReplicaSource(Protocol):
    """One generator of a run, over all its lives."""

    name: str
    """In logs, metrics and errors."""
    slots: int | None = None
    """Requests that it runs at once; None: as the run's settings say."""

    async def placed(self) -> None:
        """Wait until there is a machine for it, which may take longer than a start. Raises `TailraceError`."""
        return

    async def open(self, on_report: ReportListener) -> ReplicaConnection:
        """Start it, or connect to it; the engine need not be built yet. Raises `TailraceError`."""
        ...

    async def hello(self, client: ReplicaConnection, seed: int) -> WelcomeReply:
        """Wait until it serves, its random streams from `seed` on. Raises `TailraceError`."""
        ...

    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        """Make sure that nothing is left of it; why it failed. Raises `LifecycleError` where the system holds it."""
        ...

    async def let_go(self) -> None:
        """It has ended, and is not opened again soon: others may have its machine."""
        return

    async def close(self, client: ReplicaConnection) -> None:
        """The run is over: end it in order."""
        ...


class ReplicaListener(Protocol):
    """Learns who serves."""

    def replica_joined(self, name: str, serving: int) -> None:
        """It takes requests from now on, as one of so many."""

    def replica_left(self, name: str, serving: int, *, reason: str, in_order: bool) -> None:
        """One that served is gone, and so many are left; `in_order`: nothing of it had to be sampled again."""


class Generators:
    """All generators of a run; `router` uses them as one. Make it on a running event loop; it starts at once."""

    def __init__(
        self, settings: RunSettings, sources: Sequence[ReplicaSource], *, awaits_weights: bool = False
    ) -> None:
        """`sources` are those that the run starts, or connects to, those beyond `replicas.min` only as `scale` says.

        `awaits_weights`: whatever weights they hold, they take no request before the trainer's are installed.
        """
        self._settings = chosen = settings.generator
        never = {"per_role": 0} if chosen.restart == "never" else {}
        self._restarts = settings.restarts.model_copy(update=never)
        self.awaits_weights = awaits_weights
        own = [source.name for source in sources]
        least, most = (chosen.replicas.min, chosen.replicas.max) if chosen.replicas.may_join else (len(own), len(own))
        self.pool = ReplicaPool(own, chosen.guest_names(len(own)), least=least, most=most)
        self._scaling = ReplicaScaling(chosen.replicas)
        self.router = Router(
            self.pool.names,
            chosen.router,
            chosen.weights,
            max_staleness=settings.max_staleness,
            awaits_weights=awaits_weights,
        )
        self.router.on_change = self._look_who_serves
        self._listener: ReplicaListener | None = None
        self.joins, self.leaves, self.losses = 0, 0, 0
        """Of generators that began to serve; of those that left in order; of those that were lost."""
        self._seed = settings.generator_seed
        self._lives = Counter[str]()
        """That began, of every name."""
        self._slots: dict[str, int] = {}
        """Of those that serve, and were not asked to leave."""
        self._in_service = set[str]()
        """Those that serve, or did in this life."""
        self._follow_slots: Callable[[int], None] = lambda slots: None
        self._have_served = False
        """One at least: the settings and the model are sound, and what never served was hit by something else."""
        self._given_up_for: Exception | None = None
        """Why one of the run's own was given up, the last time."""
        self._leaving: dict[str, str] = {}
        """Why those leave that were asked to."""
        self._clients: dict[ReplicaSource, ReplicaConnection] = {}
        self._sources = {source.name: source for source in sources}
        self._changed = asyncio.Event()
        self._fatal: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self._tasks = {asyncio.create_task(self._keep(source), name=f"life of {source.name}") for source in sources}

    @property
    def engine_steps(self) -> int:
        """Of all that serve now, each since it started."""
        known = (replica.statistics for replica in self.router.replicas)
        return sum(statistics.steps_total for statistics in known if statistics is not None)

    @property
    def slots(self) -> int:
        """Requests that those which serve run at once."""
        return sum(self._slots.values())

    def tell(self, listener: ReplicaListener) -> None:
        """Of those that serve by now, and of all that join and leave from now on."""
        self._listener = listener
        for number, name in enumerate(name for name in self.pool.names if name in self._in_service):
            listener.replica_joined(name, number + 1)

    def follow_slots(self, listener: Callable[[int], None]) -> None:
        """Call it now, and whenever the number of slots changes."""
        self._follow_slots = listener
        listener(self.slots)

    @property
    def may_grow(self) -> bool:
        """Whether the run can start more than it begins with."""
        return self.pool.has_spare

    def follow_load(self, rollouts: Callable[[], int]) -> None:
        """Start more from now on, and let them go, as so many running rollouts have use for; where it `may_grow`."""
        self._tasks.add(asyncio.create_task(self._scale(rollouts), name="number of generators"))

    def metrics(self) -> dict[str, float]:
        """By the names of the metrics' table."""
        return {
            "generator/replicas": self.pool.serving,
            "generator/joins": self.joins,
            "generator/leaves": self.leaves,
            "generator/losses": self.losses,
        }

    async def serving(self) -> None:
        """Wait until the run may begin (`begins_with`). Raises `EngineFailed`."""
        await self.router.serving()
        await wait_until(self._changed, lambda: self.pool.serving >= self.begins_with or self._fatal.done())
        await self.router.serving()

    @property
    def begins_with(self) -> int:
        """How many have to serve before the run begins: of those that were given up none will."""
        return min(self.pool.least, self.pool.remaining) if self._settings.replicas.may_join else 1

    async def watch(self) -> NoReturn:
        """Wait for what fails the run, and raise it."""
        await asyncio.shield(self._fatal)

    # --- guests ------------------------------------------------------------------------------------------------------

    @property
    def had_guests(self) -> bool:
        """Whether one served, be it there still or not."""
        return any(replica.was_there and self.pool.is_guest(replica.name) for replica in self.router.replicas)

    def take_in(self) -> Place | None:
        """A place for a generator that asks to join, until `host` or `refuse` is called with it; None without room."""
        return self.pool.take_in()

    def refuse(self, place: Place) -> None:
        """Whoever had this place does not come: where the run's own were given up meanwhile, nobody does."""
        self.pool.ended(place.name)
        self._changed.set()
        if not self.pool.remaining:
            assert self._given_up_for is not None
            self._fail(self._given_up_for)

    def host(self, source: ReplicaSource) -> None:
        """Use a generator that has a place by its name, for one life."""
        self._sources[source.name] = source
        task = asyncio.create_task(self._host(source), name=f"life of {source.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self, name: str, reason: str) -> None:
        """Let one go in order, as it or somebody else asks: its requests move on, and nothing is sampled again."""
        if name in self.pool.names and self.pool.standing(name) in (Standing.COMING, Standing.SERVING):
            _logger.info("%s leaves: %s", name, reason)
            self._leaving[name] = reason
            self.pool.leaves(name)
            self._changed.set()
            if self._slots.pop(name, None) is not None:
                self._follow_slots(self.slots)
            self.router.release(name, reason)

    # --- how many there are to be ------------------------------------------------------------------------------------

    async def _scale(self, rollouts: Callable[[], int]) -> None:
        """Looks once a second, until cancelled."""
        pool, clock = self.pool, asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                load = Load(rollouts(), self.slots, pool.serving, pool.on_the_way)
                change = self._scaling.change(clock(), load)
                if change > 0 and pool.grow(change):
                    _logger.info("asks for %d generators: %d serve, and their slots are full", pool.aim, pool.serving)
                    self._changed.set()
                elif change < 0 and (name := pool.shrink()) is not None:
                    self.release(name, f"one less will do: {load.rollouts} rollouts run in {load.slots} slots")
        except Exception as error:  # noqa: BLE001 - of any kind: it fails the run
            self._fail(error)

    # --- lives -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every generator in order. Closing twice does nothing."""
        await cancelled(*self._tasks)
        clients, self._clients = self._clients, {}
        self.router.on_change = lambda replica: None
        self.router.fail(LifecycleError("the run is over"))
        if self._fatal.done():
            self._fatal.exception()  # retrieved, so that asyncio does not log it where nobody watched
        await asyncio.gather(*(source.close(client) for source, client in clients.items()))

    async def _keep(self, source: ReplicaSource) -> None:
        """Waits for a generator to fail, and opens it again where it is missing; ends when it is given up."""
        name, restarts = source.name, RestartHistory(self._restarts)
        try:
            while True:
                await wait_until(self._changed, lambda: self.pool.wants(name))
                self.pool.begins(name)
                (reason, by_itself, is_held), _ = await self._live(source)
                if is_held:
                    break
                now_s = asyncio.get_running_loop().time()
                end = EarlyEnd(now_s, has_worked=self._have_served, by_itself=by_itself)
                is_full = isinstance(reason, ClusterFull) and self.pool.does_without()
                if is_full:
                    self._scaling.no_room(now_s)
                counts = not is_full and not isinstance(reason, ReplicaReleased)
                pause_s = restarts.next_pause_s(end) if counts else 0.0
                if pause_s is None:
                    break
                if not self.pool.wants(name):
                    _logger.warning("%s is not replaced while %d are there: %s", name, self.pool.present, reason)
                    await source.let_go()
                else:
                    _logger.warning("%s is started again: %s", name, reason)
                    self.router.restarted(name)
                    await asyncio.sleep(pause_s)
            await source.let_go()
        except Exception as error:  # noqa: BLE001 - of any kind: it fails the run
            self._fail(error)
            return
        self.pool.gives_up(name)
        self._given_up_for = reason
        self._changed.set()
        if self._have_served and (left := self.pool.remaining):
            _logger.error("%s is given up, %d of the run's generators are left: %s", name, left, reason)
        else:
            self._fail(reason)

    async def _host(self, source: ReplicaSource) -> None:
        """One life of a guest, which nobody replaces."""
        try:
            ended, served = await self._live(source)
            reason = ended.reason
        except Exception as error:
            _logger.exception("%s cannot be used", source.name)
            self.pool.ended(source.name)
            reason, served = error, False
        del self._sources[source.name]
        if not served:
            _logger.warning("%s is sent away: %s", source.name, reason)
        elif not isinstance(reason, ReplicaReleased):
            _logger.warning("%s is lost, %d are left: %s", source.name, self.pool.present, reason)
        if not self.pool.remaining:
            self._fail(reason)

    def _fail(self, reason: Exception) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(reason)
        self.router.fail(reason)

    async def _live(self, source: ReplicaSource) -> tuple[EndedReplica, bool]:
        """One life: why it ended, and whether it ever served."""
        client, deadline_s, served = None, self._settings.router.start_deadline_s, False
        seed = seed_of_life(self._seed, self.pool.names.index(source.name), self._lives[source.name])
        self._lives[source.name] += 1
        try:
            await source.placed()
            async with timeout(deadline_s):
                client = self._clients[source] = await source.open(partial(self.router.report, source.name))
                welcome = await source.hello(client, seed)
            served = self._have_served = True
            if (why := self._leaving.get(source.name)) is not None:
                failure: Exception = ReplicaReleased(f"{source.name} left: {why}")
            else:
                failure = await self.router.use(source.name, client, welcome.statistics)
        except TimeoutError:
            failure = LifecycleError(
                f"{source.name} did not serve within {deadline_s:g} s (generator.router.start_deadline_s)"
            )
        except TailraceError as error:
            failure, served = error, False
        if client is not None and not isinstance(failure, ReplicaReleased):
            client.fail(failure)
        try:
            ended = await source.end(client, failure)
        except LifecycleError as error:
            ended = EndedReplica(LifecycleError(f"{failure}; {error}"), by_itself=False, is_held=True)
        else:
            if isinstance(failure, ReplicaReleased):
                ended = EndedReplica(failure, by_itself=False)
        self._clients.pop(source, None)
        self._gone(source.name, ended.reason)
        return ended, served

    # --- who serves --------------------------------------------------------------------------------------------------

    def _look_who_serves(self, replica: Replica) -> None:
        """The router says that it may have changed of this one."""
        if not (replica.serving and self.pool.serves(replica.name)):
            return
        slots = self._sources[replica.name].slots
        self._slots[replica.name] = self._settings.concurrency if slots is None else slots
        self._in_service.add(replica.name)
        self.joins += 1
        if self._settings.replicas.may_join:
            _logger.info("%s serves, as one of %d", replica.name, self.pool.serving)
        self._changed.set()
        self._follow_slots(self.slots)
        if self._listener is not None:
            self._listener.replica_joined(replica.name, self.pool.serving)

    def _gone(self, name: str, reason: Exception) -> None:
        """Nothing is left of a life of it."""
        in_order = isinstance(reason, ReplicaReleased)
        self._leaving.pop(name, None)
        self.pool.ended(name)
        self._changed.set()
        if self._slots.pop(name, None) is not None:
            self._follow_slots(self.slots)
        if name not in self._in_service:
            return
        self._in_service.discard(name)
        self.leaves, self.losses = self.leaves + in_order, self.losses + (not in_order)
        if self._listener is not None:
            self._listener.replica_left(name, self.pool.serving, reason=str(reason), in_order=in_order)


def seed_of_life(seed: int, index: int, life: int) -> int:
    """Of one life of one generator's random streams: that of the settings for the very first, never one twice
    in one start of a run.
    """
    if index == life == 0:
        return seed
    return int(np.random.SeedSequence([seed, index, life]).generate_state(1)[0]) % 2**31
