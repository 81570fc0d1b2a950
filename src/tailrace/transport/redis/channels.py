"""A conversation of two processes over two Redis streams, in whole messages and in order, through outages.

    RedisChannel (binds)    ── KEY:to   ──►  RedisChannel (connects)
                            ◄── KEY:from ──

As `transport.channels.Channel`, with which it shares a face: `hello` says that an end is there, `closed` that it left
in order. A process that dies says nothing: whoever started it notices. Each end has two threads, each with a connection
of its own: one writes, and looks every second whether Redis still has what it wrote; one reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol

from typing_extensions import override

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.transport.channels import Conversation, OpenChannel
from tailrace.transport.redis.connection import RedisConnection
from tailrace.transport.redis.entries import Entry
from tailrace.transport.redis.streams import GroupReader, OrderedReader, Origin, StreamWriter
from tailrace.urls import without_user

_logger = logging.getLogger(__name__)

SCHEME = "redis-stream:"
"""How addresses begin that mean streams of the run's Redis, and not sockets."""

_TELL_READ_EVERY = 32
"""Messages, after which an end tells how far it has read, so that the other can let go of them."""
_LOOK_S = 1.0
"""Between two looks whether Redis still has what was written."""
_WAIT_S = 2.0
"""How long one read waits inside Redis."""
_CLOSE_S = 2.0
"""How long closing may take, where Redis is away."""
_LEFTOVERS_S = 60
"""After which Redis removes a stream whose writer has closed it."""


class _Kind(enum.StrEnum):
    """What a message of a conversation is."""

    HELLO = "hello"
    MESSAGE = "message"
    BODY = "body"
    """Of the message that follows."""
    READ = "read"
    """How far the other end has read."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RedisFigures:
    """Of one process, since it began."""

    outages: int
    """Times that Redis was away."""
    away_s: float
    restored: int
    """Times that it had lost a part of a stream, which was written again."""
    ignored: int
    """Entries of other starts of the run that were read: here, or by a rank of an outside trainer that told so."""


class RedisUser(Protocol):
    """What writes and reads streams, and is counted in the figures of its process."""

    @property
    def times_restored(self) -> int:
        """How often Redis had lost something that it wrote."""
        ...

    @property
    def num_ignored(self) -> int:
        """Entries that it read, of other starts of the run."""
        ...


@dataclass(slots=True)
class RedisPlace:
    """Where the streams of one start of a run are, for one process of it. Knows whether Redis is away."""

    url: str
    origin: Origin
    outage_s: float = 60.0
    prefix: str = "tailrace"
    max_bytes: int | None = None
    """That Redis takes at most, where there is a bound and it was asked for."""
    _listeners: list[Callable[[bool], None]] = field(default_factory=list)
    _users: list[RedisUser] = field(default_factory=list)
    _restored: int = 0
    """Of users that have ended; so is the next."""
    _ignored: int = 0
    _failure: TransportError | None = None
    _has_failed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_away: int = 0
    _outages: int = 0
    _away_s: float = 0.0
    """Less the clock's time at its beginning, of an outage that lasts."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_away(self) -> bool:
        """Whether any connection waits for Redis."""
        return self._num_away > 0

    @property
    def figures(self) -> RedisFigures:
        """Of the connections and conversations of this process."""
        with self._lock:
            away_s = self._away_s + (time.monotonic() if self.is_away else 0.0)
        return RedisFigures(
            self._outages,
            away_s,
            restored=self._restored + sum(user.times_restored for user in self._users),
            ignored=self._ignored + sum(user.num_ignored for user in self._users),
        )

    def address(self, name: str) -> str:
        """Of a conversation of that name, in this start of the run: no other one trims it, or writes its parts.

        >>> RedisPlace("redis://host", Origin("quickstart", "e")).address("batches")
        'redis-stream:tailrace:quickstart:e:batches'
        """
        return f"{SCHEME}{self.prefix}:{self.origin.run}:{self.origin.epoch}:{name}"

    @property
    def owner_key(self) -> str:
        """Which start of the run has its name."""
        return f"{self.prefix}:{self.origin.run}:owner"

    def connect(self) -> RedisConnection:
        """A connection, which is made when it is first used."""
        return RedisConnection(self.url, outage_s=self.outage_s, on_away=self._tell)

    def remove_keys(self) -> None:
        """Remove what earlier starts of the run left, which ended without a word. Blocks; scans all keys.

        To be called by who has the run's name, which stays.
        """
        with contextlib.closing(self.connect()) as connection:
            cursor: bytes | str = "0"
            while True:
                reply = connection.one("SCAN", cursor, "MATCH", f"{self.prefix}:{self.origin.run}:*", "COUNT", 1000)
                assert isinstance(reply, list)
                cursor, found = reply  # type: ignore[assignment]
                keys = [key for key in found if key != self.owner_key.encode()]  # type: ignore[union-attr]
                if keys:
                    connection.one("UNLINK", *keys)  # type: ignore[arg-type]
                if cursor == b"0":
                    return

    def count(self, user: RedisUser) -> None:
        """From now on its figures are among this process's."""
        self._users.append(user)

    def settle(self, user: RedisUser) -> None:
        """It has ended: what it came to still counts, and it is let go. Settling twice does nothing."""
        if user in self._users:
            self._users.remove(user)
            self._restored += user.times_restored
            self._ignored += user.num_ignored

    @property
    def open_channel(self) -> OpenChannel:
        """Of ends whose messages stay in Redis until the other end has read them."""
        return partial(RedisChannel, self)

    @property
    def open_keeping_channel(self) -> OpenChannel:
        """Of ends whose messages stay in Redis until they are released."""
        return partial(RedisChannel, self, keeps=True)

    def tell(self, listener: Callable[[bool], None]) -> None:
        """From now on call this on the running event loop when Redis goes away, and when it is back."""
        loop = asyncio.get_running_loop()

        def in_thread(is_away: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(listener, is_away)

        self._listeners.append(in_thread)

    async def watch(self) -> NoReturn:
        """Wait until Redis was away for too long, or gave what cannot be read, and raise that."""
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    def fail(self, error: TransportError) -> None:
        """A conversation ended of this, which was not its other end's wish. Called on the event loop."""
        self._failure = self._failure or error
        self._has_failed.set()

    def _tell(self, is_away: bool, why: str) -> None:
        with self._lock:
            before, self._num_away = self._num_away, self._num_away + (1 if is_away else -1)
            if (before == 0) == (self._num_away == 0):
                return
            self._outages += is_away
            self._away_s += -time.monotonic() if is_away else time.monotonic()
        if why:
            state = "is away, and is waited for" if is_away else "is back"
            _logger.warning("Redis at %s %s: %s", without_user(self.url), state, why)
        for listener in self._listeners:
            listener(is_away)


class RedisChannel(Conversation):
    """One end. Make it on a running event loop. Messages that are on their way outlive outages of Redis."""

    def __init__(
        self,
        place: RedisPlace,
        address: str,
        *,
        bind: bool,
        on_message: Callable[[bytes], None],
        changed: asyncio.Event,
        peer: str,
        on_body: Callable[[memoryview], None] | None = None,
        keeps: bool = False,
    ) -> None:
        """A message may bring one body, as over a `Channel`. `keeps`: until `release`, not until the other end read."""
        super().__init__()
        self._on_message, self._on_body, self._changed, self._peer = on_message, on_body, changed, peer
        self._place = place
        self._loop, self._keeps = asyncio.get_running_loop(), keeps
        self._outbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._num_sent = 0
        self._is_closing = False
        key = address.removeprefix(SCHEME)
        out, incoming = (f"{key}:{way}" for way in (("to", "from") if bind else ("from", "to")))
        self._links = (place.connect(), place.connect())
        self._writer = StreamWriter(self._links[0], out, place.origin)
        self._reader = OrderedReader(GroupReader(self._links[1], incoming, "peer", place.origin))
        self._threads = [
            threading.Thread(target=self._write_all, name=f"writes {out}", daemon=True),
            threading.Thread(target=self._read_all, name=f"reads {incoming}", daemon=True),
        ]
        self._send_out([(_Kind.HELLO, b"")])
        for thread in self._threads:
            thread.start()
        place.count(self)

    @property
    def times_restored(self) -> int:
        """How often Redis had lost something that this end wrote."""
        return self._writer.times_restored

    @property
    def num_ignored(self) -> int:
        """Entries that this end read, of other starts of the run."""
        return self._reader.reader.num_ignored

    @override
    def send(self, message: bytes, body: mmap.mmap | None = None) -> None:
        """Hand a message to the thread that writes. A `body` must stay as it is until it is released."""
        if self.failure:
            raise self.failure
        bodies: list[tuple[str, bytes | memoryview]] = [] if body is None else [(_Kind.BODY, memoryview(body))]
        self._send_out([*bodies, (_Kind.MESSAGE, message)])

    @property
    @override
    def num_sent(self) -> int:
        return self._num_sent

    @override
    def release(self, number: int) -> None:
        if self._keeps:
            self._outbox.put(_Order(release=number))

    @override
    async def close(self) -> None:
        self._end(PeerGone(f"the channel to the {self._peer} is closed"))
        if not self._is_closing:
            self._is_closing = True
            self._outbox.put(_Order([(_Kind.CLOSED, b"")], is_last=True))
        try:
            await asyncio.to_thread(self._join)
        finally:
            self._place.settle(self)

    def _join(self) -> None:
        self._links[1].close()
        self._threads[0].join(_CLOSE_S)
        for link in self._links:
            link.close()
        for thread in self._threads:  # one that is connecting cannot be woken
            thread.join(_CLOSE_S)

    def _send_out(self, messages: list[tuple[str, bytes | memoryview]]) -> None:
        self._num_sent += len(messages)
        self._outbox.put(_Order(messages))

    # --- the thread that writes --------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Waits for orders; ends with the last one, or with Redis."""
        try:
            while not self._links[0].is_closed:
                try:
                    order = self._outbox.get(timeout=_LOOK_S)
                except queue.Empty:
                    self._writer.restore()
                    continue
                if order.messages:
                    self._writer.append(order.messages)
                if order.release:
                    self._writer.release(order.release)
                if order.is_last:
                    self._writer.expire(_LEFTOVERS_S)
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, the conversation is over
            self._tell_end(error)

    # --- the thread that reads ---------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Waits for messages; ends with the channel."""
        try:
            while not self._links[1].is_closed:
                entry = self._reader.next(_WAIT_S)
                if entry is not None:
                    self._reader.acknowledge(entry)
                    self._loop.call_soon_threadsafe(self._handle, entry)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell_end(error)

    def _tell_end(self, error: Exception) -> None:
        known = error if isinstance(error, TransportError) else TransportError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waits
            self._loop.call_soon_threadsafe(self._end, known)

    # --- on the event loop -------------------------------------------------------------------------------------------

    def _handle(self, entry: Entry) -> None:
        if self.failure:
            return
        if entry.number % _TELL_READ_EVERY == 0:
            self._send_out([(_Kind.READ, str(entry.number).encode())])
        match entry.kind:
            case _Kind.HELLO:
                self.connected = True
            case _Kind.CLOSED:
                self._end(PeerGone(f"the {self._peer} ended or closed its end"))
            case _Kind.READ:
                if not self._keeps:
                    self._outbox.put(_Order(release=int(entry.data)))
            case _:
                self._deliver(entry)
        self._changed.set()

    def _deliver(self, entry: Entry) -> None:
        try:
            if entry.kind == _Kind.BODY:
                if self._on_body is None:
                    raise CorruptData(f"a message of the {self._peer} brings a body")
                self._on_body(memoryview(entry.data))
            else:
                self._on_message(entry.data)
        except TransportError as error:
            self._end(error)

    def _end(self, error: TransportError) -> None:
        if self.failure is None and not isinstance(error, PeerGone):
            self._place.fail(error)
        self.failure = self.failure or error
        self.connected = False
        self._changed.set()


@dataclass(frozen=True, slots=True)
class _Order:
    """For the thread that writes."""

    messages: list[tuple[str, bytes | memoryview]] = field(default_factory=list)
    release: int = 0
    is_last: bool = False
