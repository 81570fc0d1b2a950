"""One connection to Redis, for one thread at a time: it waits through outages, and names the one that lasts too long.

    execute ──► sent, and answered                      ──► replies
                └─ gone, loading, read-only, no memory ──► pause ──► connected again ──► sent again, up to `outage_s`
                └─ wrong password, user, TLS, address   ──► SettingsError at once

Commands are sent as they are and answered as Redis answers them (RESP2), a pipeline at a time: nothing is converted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, cast
from urllib.parse import urlsplit, urlunsplit

from tailrace.errors import NotAnswering, PeerGone, SettingsError, TransportError
from tailrace.extras import extra_needed
from tailrace.urls import without_user

Argument: TypeAlias = bytes | str | int | memoryview
Command: TypeAlias = Sequence[Argument]
Reply: TypeAlias = "bytes | int | list[Reply] | Exception | None"
"""As Redis answers; an error that it answers one command of several with stands in that command's place."""

_URL = ("transport", "redis", "url")

PASSWORD_VARIABLE = "TAILRACE_REDIS_PASSWORD"
"""The environment variable that holds the password of a URL without one, which stays out of the run's folder."""

ANSWERS_S = 10.0
"""Within which Redis must answer what it need not wait for, or it is away."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Between two tries, which are the rarer the longer Redis is away."""
_PASSING = ("MISCONF", "NOREPLICAS", "BUSY ")
"""Errors that may pass, beside those that have classes: a disk that is full, replicas that are away, a script."""
FIRST_S = 4.0
"""Within which Redis must be there, and answer, when a run starts."""
_OLDEST = (6, 2)
"""What trims by position and reclaims."""


class ConnectionLost(Exception):
    """Redis went away within a pipeline, or refused a part of it for now: how far it came is not known."""


class _Wire(Protocol):
    """What is used of redis-py's `Connection`, which declares no types."""

    @property
    def is_connected(self) -> bool: ...
    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_commands(self, commands: Sequence[Command]) -> Sequence[bytes | memoryview]: ...
    def send_packed_command(self, command: Sequence[bytes | memoryview]) -> None: ...
    def read_response(self, *, disable_decoding: bool, timeout: float) -> Reply: ...


class RedisConnection:
    """Connects when it is first used. Close it from any thread, which ends what waits in it with `PeerGone`."""

    def __init__(
        self,
        url: str,
        *,
        outage_s: float = 60.0,
        answers_s: float = ANSWERS_S,
        on_away: Callable[[bool, str], None] = lambda _is_away, _why: None,
    ) -> None:
        """`on_away` is called when Redis goes away, and when it is back: in this connection's thread, with a reason.

        An outage may end without one: nobody waits any more.
        """
        self.url, self._outage_s, self._answers_s, self._on_away = url, outage_s, answers_s, on_away
        self.times_connected = 0
        """How often: between two of them Redis may have lost what it was given."""
        self._closed = threading.Event()
        self._away_since_s: float | None = None
        self._refused: Argument | None = None
        """The command that it was refused for now, if that is why it counts as away."""
        self._lock = threading.Lock()
        self._connection = _make(url, answers_s)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed at this end."""
        return self._closed.is_set()

    @property
    def place(self) -> str:
        """Where Redis is, for people: without its password."""
        return without_user(self.url)

    def execute(self, commands: Sequence[Command], *, waits_s: float = 0.0, repeats: bool = True) -> list[Reply]:
        """Send all of them, and wait for their replies; through outages, too.

        `waits_s`: how long a command among them may wait inside Redis. `repeats`: whether they may be sent twice; else
        this raises `ConnectionLost` after an outage, once Redis is back. Raises `SettingsError` for a user or password
        that is refused, `TransportError` when Redis was away for `outage_s`, and `PeerGone` once this end is closed.
        """
        while True:
            try:
                replies = self._once(commands, waits_s)
            except TransportError:
                raise
            except Exception as error:
                self._require_passing(error)
                self._pause(error)
                if not repeats:
                    self.execute([("PING",)])
                    raise ConnectionLost(str(error)) from error
                continue
            refused = self._refused_of(commands, replies)
            if refused is None:
                self._is_back(commands)
                return replies
            self._refused, why = refused
            self._pause(why)
            if not repeats:
                raise ConnectionLost(str(why))

    def one(self, *command: Argument, waits_s: float = 0.0) -> Reply:
        """One command's reply. Raises the error that it is answered with as a `TransportError`."""
        (reply,) = self.execute([command], waits_s=waits_s)
        return raised(reply)

    def close(self) -> None:
        """Closing twice does nothing."""
        self._closed.set()
        self._connection.disconnect()
        self._tell_away(None, "")

    def _once(self, commands: Sequence[Command], waits_s: float) -> list[Reply]:
        if self._closed.is_set():
            raise PeerGone(f"the connection to Redis ({self.place}) is closed")
        connection = self._connection
        if self.times_connected == 0 or not connection.is_connected:
            connection.connect()
            self.times_connected += 1
        connection.send_packed_command(connection.pack_commands(commands))
        return [self._read(waits_s) for _ in commands]

    def _read(self, waits_s: float) -> Reply:
        from redis.exceptions import ConnectionError as Gone
        from redis.exceptions import ResponseError

        try:
            return self._connection.read_response(disable_decoding=True, timeout=self._answers_s + waits_s)
        except Gone:
            raise
        except ResponseError as error:
            return error

    def _require_passing(self, error: Exception) -> None:
        """Raise unless it may pass: the connection is gone, or Redis is busy with something else."""
        from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

        if self._closed.is_set():
            raise PeerGone(f"the connection to Redis ({self.place}) is closed") from None
        refuses = ""
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            refuses = "refuses this user or password"
        elif "SSL" in str(error) and self.times_connected == 0:
            refuses = "cannot be spoken to by TLS as transport.redis.url says"
        if refuses:
            raise SettingsError(f"Redis at {self.place} {refuses}: {error}", key=_URL) from error
        self._connection.disconnect()
        if not isinstance(error, RedisError | OSError):
            raise error

    def _refused_of(self, commands: Sequence[Command], replies: Sequence[Reply]) -> tuple[Argument, Exception] | None:
        """The first command that is refused for now, and why. Raises `SettingsError` for one that is for ever."""
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Exception):
                if _is_passing(reply):
                    return command[0], reply
                if _no_permission(reply):
                    self._require_passing(reply)
        return None

    def _pause(self, why: Exception) -> None:
        """Before the next try, the longer the longer Redis is away. Raises `TransportError` where that is too long."""
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._tell_away(now_s, _reason(why))
        away_s = now_s - (self._away_since_s or now_s)
        if away_s >= self._outage_s:
            raise TransportError(
                f"Redis at {self.place} was away for {self._outage_s:g} s (transport.redis.outage_s), at last because "
                f"of: {_reason(why)}"
            ) from why
        if self._closed.wait(min(max(_PAUSE_S, away_s / 2), _LONGEST_PAUSE_S)):
            raise PeerGone(f"the connection to Redis ({self.place}) is closed")

    def _is_back(self, commands: Sequence[Command]) -> None:
        """Commands were answered: it is away no more, unless it refused one that is not among these."""
        if self._away_since_s is not None:
            if self._refused is not None and all(command[0] != self._refused for command in commands):
                return
            self._refused = None
            self._tell_away(None, "it answers")

    def _tell_away(self, since_s: float | None, why: str) -> None:
        """Once for each change; one that is closed is not away."""
        with self._lock:
            if self._closed.is_set():
                since_s = None
            has_changed = (since_s is None) != (self._away_since_s is None)
            self._away_since_s = since_s
        if has_changed:
            self._on_away(since_s is not None, why)


def raised(reply: Reply) -> Reply:
    """The reply, unless it is an error: raises it as a `TransportError`."""
    if isinstance(reply, Exception):
        raise TransportError(f"Redis answered: {reply}") from reply
    return reply


def with_password(url: str) -> str:
    """The URL with the password of the environment, where it names none.

    >>> os.environ[PASSWORD_VARIABLE] = "x y"
    >>> with_password("rediss://trainer@host:7000/1")
    'rediss://trainer:x%20y@host:7000/1'
    >>> del os.environ[PASSWORD_VARIABLE]
    """
    from urllib.parse import quote

    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingsError(f"the address of Redis cannot be read: {error}", key=_URL) from None
    if not password or parts.password is not None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{quote(password)}@{parts.netloc.split('@')[-1]}"))


def _make(url: str, answers_s: float) -> _Wire:
    """Raises `SettingsError` without redis-py, and for a URL that is none."""
    try:
        from redis.backoff import NoBackoff
        from redis.connection import ConnectionPool
        from redis.retry import Retry

        from tailrace.transport.redis.replies import ReplyParser
    except ImportError as error:
        raise SettingsError(extra_needed("transport.redis", "redis", "redis"), key=("transport", "redis")) from error
    timeouts: dict[str, float | bool] = {"socket_timeout": answers_s}
    if not url.startswith("unix:"):
        timeouts |= {"socket_connect_timeout": answers_s, "socket_keepalive": True}
    try:
        retry = Retry(NoBackoff(), 0)
        pool = ConnectionPool.from_url(url, protocol=2, retry=retry, parser_class=ReplyParser, **timeouts)
        return cast("_Wire", pool.make_connection())
    except (ValueError, TypeError) as error:
        message = f"transport.redis.url is no address of Redis ({without_user(url)}): {error}"
        raise SettingsError(message, key=_URL) from error


def require_redis(url: str) -> None:
    """Raise `SettingsError` unless Redis lets this user in, is new enough, and forgets nothing by itself.

    Where none answers it is `NotAnswering`.
    """
    connection = RedisConnection(url, outage_s=FIRST_S, answers_s=FIRST_S)
    try:
        server = _info(connection.one("INFO", "server"))
        memory = _info(connection.one("INFO", "memory"))
    except TransportError as error:
        scheme = urlsplit(url).scheme
        message = f"no Redis answers at {connection.place} by {scheme}://: {error.__cause__ or error}"
        raise NotAnswering(message, key=_URL) from error
    finally:
        connection.close()
    version = server.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise SettingsError(f"Redis at {connection.place} is {version}, and 6.2 or newer is needed", key=_URL)
    policy = memory.get("maxmemory_policy", "")
    if memory.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise SettingsError(
            f"Redis at {connection.place} removes what it likes where its memory is full (maxmemory-policy {policy}): "
            "set it to noeviction",
            key=_URL,
        )


def memory_bound(url: str) -> int | None:
    """Bytes that Redis takes at most (`maxmemory`); None: whatever its machine has. Blocks."""
    with contextlib.closing(RedisConnection(url)) as connection:
        return int(_info(connection.one("INFO", "memory")).get("maxmemory", "0")) or None


def _info(reply: Reply) -> dict[str, str]:
    """Of the command INFO."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _reason(error: Exception) -> str:
    """As Redis said it: the library cuts the first word off."""
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if code else str(error)


def _is_passing(error: Exception) -> bool:
    """Whether what Redis answers may be different soon."""
    from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError

    classes = (OutOfMemoryError, ReadOnlyError, MasterDownError, TryAgainError)
    return isinstance(error, classes) or str(error).startswith(_PASSING)


def _no_permission(error: Exception) -> bool:
    from redis.exceptions import NoPermissionError

    return isinstance(error, NoPermissionError)
