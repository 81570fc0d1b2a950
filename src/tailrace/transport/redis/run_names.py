"""A run's name in a Redis, which one start of a run has at a time: two would remove each other's keys.

own_run_name ──► free, or given back     ──► ours: renewed by a thread, given back at the end
             ├─► of a run that was killed ──► waited for, a lease at most
             └─► renewed by a run         ──► SettingsError
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from tailrace.errors import SettingsError, TransportError
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import RedisConnection
from tailrace.transport.redis.leases import RENEWALS, Attempt, Lease
from tailrace.urls import without_user

_logger = logging.getLogger(__name__)

LEASE_S = 20.0
"""How long the name of a run that was killed is taken: a resumed one waits for that."""
_LOOK_S = 0.2
"""Between two looks whether a name became free."""
_GIVES_BACK_S = 1.0
"""How long giving it back may take, where Redis is away."""


@contextlib.asynccontextmanager
async def own_run_name(place: RedisPlace, who: str, lease_s: float = LEASE_S) -> AsyncIterator[None]:
    """Have the run's name in here. `who` is this process, for those who are refused.

    Raises `SettingsError` where another run has it and renews it. Should Redis forget it, it is taken again; where
    another run took it before, `place` fails.
    """
    connection = RedisConnection(place.url, outage_s=place.outage_s)  # which counts no outages: others wait for Redis
    lease = Lease(connection, place.owner_key, f"{place.origin.epoch} {who}", lease_s)
    with contextlib.closing(connection):
        await _take(lease, place)
        try:
            with _kept(lease, connection, _fail_on_loop(place)):
                yield
        finally:
            await asyncio.to_thread(_give_back, lease, place)


async def _take(lease: Lease, place: RedisPlace) -> None:
    """Wait for the name, as long as the one who has it does not renew it."""
    has_said = False
    while (attempt := await asyncio.to_thread(lease.attempt)) is not Attempt.TAKEN:
        if attempt is Attempt.RENEWED:
            raise SettingsError(
                f"another run {_of(place)} is going on ({_who(lease)}), and two of one name would remove each other's "
                "keys: choose another --name or another transport.redis.prefix, or wait until that run has ended "
                f"(where it is killed, for {lease.length_s:g} s more)",
                key=("name",),
            )
        if not has_said:
            has_said = True
            _logger.warning(
                "waiting for the name of a run %s: %s has it, and loses it within %g s if it was killed",
                *(_of(place), _who(lease), lease.length_s),
            )
        await asyncio.sleep(_LOOK_S)


@contextlib.contextmanager
def _kept(lease: Lease, connection: RedisConnection, on_lost: Callable[[TransportError], None]) -> Iterator[None]:
    """In a thread of its own: no stall of the event loop makes the run look killed."""
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lease, ended, on_lost), name="tailrace-run-name", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        connection.close()
        keeper.join()


def _keep(lease: Lease, ended: threading.Event, on_lost: Callable[[TransportError], None]) -> None:
    """The thread: renews the name until the end, or until another has it."""
    while not ended.wait(lease.length_s / RENEWALS):
        try:
            attempt = lease.attempt()
        except TransportError:  # Redis is away for long, which fails those who wait for it
            continue
        except SettingsError as error:
            on_lost(TransportError(str(error)))
            return
        if attempt is not Attempt.TAKEN:
            on_lost(
                TransportError(
                    f"this run lost its name in Redis to another one ({_who(lease)}), which was started while this "
                    "one was stopped, or Redis was away: end that one, or resume this one under another "
                    "transport.redis.prefix"
                )
            )
            return


def _fail_on_loop(place: RedisPlace) -> Callable[[TransportError], None]:
    """Has the place fail, from another thread than that of the event loop which runs now."""
    loop = asyncio.get_running_loop()

    def fail(error: TransportError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(place.fail, error)

    return fail


def _give_back(lease: Lease, place: RedisPlace) -> None:
    """Over a connection that waits for no outage: the name lapses by itself, too."""
    connection = RedisConnection(place.url, outage_s=_GIVES_BACK_S, answers_s=_GIVES_BACK_S)
    with contextlib.closing(connection), contextlib.suppress(TransportError, SettingsError):
        Lease(connection, place.owner_key, lease.token, lease.length_s).give_back()


def _of(place: RedisPlace) -> str:
    where = without_user(place.url)
    return f"called {place.origin.run!r} in Redis at {where} under the prefix {place.prefix!r}"


def _who(lease: Lease) -> str:
    """As it says itself, after its epoch."""
    return lease.holder.partition(" ")[2] or "one that does not say where it runs"
