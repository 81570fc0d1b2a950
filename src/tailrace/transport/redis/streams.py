"""The writer and the reader of one Redis stream, which outlives what Redis forgets.

    StreamWriter   append ──► XADD, numbered from 1 ──► kept here and in Redis until `release`d by number
                   after each reconnect it asks what is there, and writes again what is not: a flush, a restart without
                   data, a failover that lost its last second
    GroupReader    read ──► each message once ──► `acknowledge`; after a reconnect `reclaim` what a lost answer held
    OrderedReader  every message once and in order, whatever was written again

Entries of another run or epoch are ignored and counted: a stale start of a run can neither feed nor end this one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.errors import TransportError
from tailrace.transport.redis.connection import (
    Command,
    ConnectionLost,
    RedisConnection,
    Reply,
    raised,
)
from tailrace.transport.redis.entries import Entry, Header, Message, checked, part_key, read_header

_logger = logging.getLogger(__name__)

_AT_ONCE, _AT_ONCE_BYTES = 256, 8 << 20
"""Of messages that go to Redis in one pipeline."""
_LOOKED_AT = 64
"""Entries that are looked at from the end for the writer's own last one; others are of earlier starts of the run."""
_FIRST_LOOK_S = 0.02
"""Between two looks for a stream that is not there yet, or again; it doubles up to half a second."""
_PARTS_AT_ONCE = 8
_READ_AHEAD = 4
_PENDING = 1024
"""More messages than a reader was given and has not acknowledged."""
_INCOMPLETE_S = 60.0
"""How long parts of a message may be missing, until they are written again."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What every entry carries."""

    run: str
    epoch: str


class StreamWriter:
    """The one writer of a stream. Its calls block: one thread at a time, off the event loop."""

    def __init__(self, connection: RedisConnection, key: str, origin: Origin) -> None:
        self.key = key
        self.times_restored = 0
        """How often Redis had lost something that was not released."""
        self._redis, self._origin = connection, origin
        self._numbers = itertools.count(1)
        self._kept: deque[Message] = deque()
        self._ids: dict[int, bytes] = {}
        self._next = 1
        """Number of the first message that is not in Redis, as far as is known."""
        self._looked_at = 0
        """Of the connection's times, when it was last asked what is there."""
        self._exists = False
        self._released = 0

    def append(self, messages: Sequence[tuple[str, bytes | memoryview]]) -> int:
        """Write messages of these kinds, through outages; returns the number of the last. Large data is not copied.

        They count as appended even where this raises. Raises `TransportError` where Redis was away for too long.
        """
        for kind, data in messages:
            self._kept.append(Message(next(self._numbers), kind, data))
        self._catch_up(asks=False)
        return self._kept[-1].number if self._kept else self._released

    def restore(self) -> bool:
        """Write what is kept and not in Redis, if anything; whether Redis had lost something.

        To be called now and then while a reader is waited for: nobody else notices that Redis forgot a stream.
        """
        return self._catch_up(asks=True)

    def _catch_up(self, *, asks: bool) -> bool:
        lost = False
        while True:
            try:
                lost = self._look(asks) or lost
                if not self._write_next():
                    return lost
            except ConnectionLost:
                self._looked_at = 0

    def release(self, number: int) -> None:
        """Messages up to this one will not be needed again: remove them, here and from Redis."""
        commands: list[Command] = []
        last_id = None
        while self._kept and self._kept[0].number <= number:
            message = self._kept.popleft()
            last_id = self._ids.pop(message.number, last_id)
            self._released = message.number
            if message.num_parts:
                commands.append(("UNLINK", *(part_key(self.key, message.number, i) for i in range(message.num_parts))))
        if last_id is not None:
            commands.append(("XTRIM", self.key, "MINID", _after(last_id)))
        if commands:
            self._redis.execute(commands)

    def expire(self, after_s: float) -> None:
        """Nothing more is written: Redis removes all of it after so long, which readers have to read the rest."""
        keys = [self.key]
        for message in self._kept:
            keys += [part_key(self.key, message.number, i) for i in range(message.num_parts)]
        self._redis.execute([("EXPIRE", key, int(after_s)) for key in keys])

    def _look(self, asks: bool) -> bool:
        """Ask what of this epoch is there, after a reconnect or where asked to; whether something is lost."""
        if self._looked_at != self._redis.times_connected or not self._redis.times_connected:
            last = self._last_there()
            self._looked_at = self._redis.times_connected
        elif asks and self._kept and self._kept[0].number < self._next:
            exists = raised(self._redis.execute([("EXISTS", self.key)], repeats=False)[0])
            last = self._next - 1 if exists else 0
        else:
            return False
        return self._go_on_after(last)

    def _go_on_after(self, last: int) -> bool:
        """Redis holds this epoch's messages up to that one; whether that is less than there was."""
        oldest = self._kept[0].number if self._kept else self._next
        lost = range(max(oldest, last + 1), self._next)
        if lost:
            self.times_restored += 1
            what = f"messages {lost[0]} to {lost[-1]}"
            _logger.warning("Redis lost %s of the stream %s, which are written again", what, self.key)
        self._exists, self._next = last > 0, max(oldest, last + 1)
        return bool(lost)

    def _last_there(self) -> int:
        """The number of this epoch's newest entry; 0 where there is none."""
        (reply,) = self._redis.execute([("XREVRANGE", self.key, "+", "-", "COUNT", _LOOKED_AT)], repeats=False)
        for entry_id, fields in _entries(raised(reply)):
            header, _ = read_header(self.key, fields)
            if (header.run, header.epoch) == (self._origin.run, self._origin.epoch):
                self._ids[header.number] = entry_id
                return header.number
        return 0

    def _write_next(self) -> bool:
        """Write some of what is not there; whether there was any."""
        messages = self._some_unwritten()
        if not messages:
            return False
        self._write_parts(messages)
        commands: list[Command] = []
        for message in messages:
            data = b"" if message.num_parts else message.data
            header = message.header(self._origin.run, self._origin.epoch)
            only_there = ("NOMKSTREAM",) if self._exists or commands else ()
            commands.append(("XADD", self.key, *only_there, "*", "header", header, "data", data))
        replies = self._redis.execute(commands, repeats=False)
        for reply, message in zip(replies, messages, strict=True):
            entry_id = raised(reply)
            if entry_id is None:  # the stream is gone: begin again
                self._go_on_after(0)
                return True
            assert isinstance(entry_id, bytes)
            self._exists, self._next = True, message.number + 1
            self._ids[message.number] = entry_id
        return True

    def _write_parts(self, messages: Sequence[Message]) -> None:
        """Before any entry tells of them: Redis, full or read-only, may refuse a command and take the next.

        After an outage it is asked first what is there: an entry would hide that those before it are lost.
        """
        parts: list[Command] = [
            ("SET", part_key(self.key, message.number, number), part)
            for message in messages
            for number, part in enumerate(message.parts())
        ]
        for reply in self._redis.execute(parts, repeats=False) if parts else ():
            raised(reply)

    def _some_unwritten(self) -> list[Message]:
        messages: list[Message] = []
        num_bytes = 0
        first = self._next - self._kept[0].number if self._kept else 0
        for message in itertools.islice(self._kept, first, first + _AT_ONCE):
            num_bytes += len(message.data)
            if messages and num_bytes > _AT_ONCE_BYTES:
                break
            messages.append(message)
        return messages


class GroupReader:
    """The one consumer of a group, which has its name. Its calls block: one thread at a time."""

    def __init__(self, connection: RedisConnection, key: str, name: str, origin: Origin) -> None:
        self.key, self.name = key, name
        self.group = f"{name}@{origin.epoch}"
        """Of this epoch: a reader of an earlier one that lives on takes nothing from this one."""
        self.num_ignored = 0
        """Entries of another run or epoch."""
        self.known = 0
        """Number of a message up to which none is to be read again, whatever is written again."""
        self._redis, self._origin = connection, origin
        self._has_group = False
        self._missing_since_s: dict[int, float] = {}
        self._pause_s = _FIRST_LOOK_S

    @property
    def misses(self) -> bool:
        """Whether parts of messages that it was given are not there."""
        return bool(self._missing_since_s)

    @property
    def times_connected(self) -> int:
        """How often: with a connection an answer may be gone, and what it gave to this consumer is given no more."""
        return self._redis.times_connected

    def read(self, count: int = 1, wait_s: float = 1.0, *, done: Sequence[Entry] = ()) -> list[Entry]:
        """Messages that it was not given yet; waits for one, for so long at most.

        Entries that are `done` are acknowledged in the same pipeline. Raises `CorruptData` for what cannot be read, and
        `TransportError` where Redis was away for too long.
        """
        if not self._has_group and not self._join():
            return []
        wait_ms = max(1, int(wait_s * 1000))
        group = ("XREADGROUP", "GROUP", self.group, self.name)
        command = (*group, "COUNT", count, "BLOCK", wait_ms, "STREAMS", self.key, ">")
        commands: list[Command] = [self._acknowledging(done)] if done else []
        *_, reply = self._redis.execute([*commands, command], waits_s=wait_s)
        if isinstance(reply, Exception) and str(reply).startswith(("NOGROUP", "UNBLOCKED")):
            self._has_group = False  # Redis forgot it, and its writer writes it again
            return []
        streams = raised(reply)
        return [] if streams is None else self._opened(_entries(streams[0][1]))  # type: ignore[index]

    def reclaim(self) -> list[Entry]:
        """Messages that it was given, by an answer that may be lost, and has not acknowledged."""
        if not self._has_group and not self._join():
            return []
        least_idle_ms = 0
        command = ("XAUTOCLAIM", self.key, self.group, self.name, least_idle_ms, "0-0", "COUNT", _PENDING)
        (reply,) = self._redis.execute([command])
        if isinstance(reply, Exception) and str(reply).startswith("NOGROUP"):
            self._has_group = False
            return []
        return self._opened(_entries(raised(reply)[1]))  # type: ignore[index]

    def acknowledge(self, entries: Sequence[Entry]) -> None:
        """They need not be given to it again."""
        if entries:
            self._redis.execute([self._acknowledging(entries)])

    def _acknowledging(self, entries: Sequence[Entry]) -> Command:
        return ("XACK", self.key, self.group, *(entry.id for entry in entries))

    def _join(self) -> bool:
        """Make the group, where the stream is there; whether it is. Waits a little where it is not."""
        (reply,) = self._redis.execute([("XGROUP", "CREATE", self.key, self.group, "0")])
        if not isinstance(reply, Exception) or str(reply).startswith("BUSYGROUP"):
            self._has_group, self._pause_s = True, _FIRST_LOOK_S
            return True
        if "requires the key to exist" not in str(reply):
            raised(reply)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 0.5)
        return False

    def _opened(self, found: Sequence[tuple[bytes, object]]) -> list[Entry]:
        entries, others = [], []
        for entry_id, fields in found:
            if fields is None:  # it was trimmed meanwhile
                others.append(entry_id)
                continue
            header, data = read_header(self.key, fields)
            if (header.run, header.epoch) != (self._origin.run, self._origin.epoch):
                self.num_ignored += 1
                others.append(entry_id)
                continue
            if header.number <= self.known:
                others.append(entry_id)
                continue
            whole = data if not header.num_parts else self._parts(header)
            if whole is not None:
                entries.append(Entry(entry_id, header.number, header.kind, checked(self.key, header, whole)))
        if others:
            self._redis.execute([("XACK", self.key, self.group, *others)])
        return entries

    def _parts(self, header: Header) -> bytes | None:
        """The bytes of a message that lies in parts; None where some are gone, and will be written again.

        Raises `TransportError` where that does not happen.
        """
        parts: list[bytes] = []
        for first in range(0, header.num_parts, _PARTS_AT_ONCE):
            some = range(first, min(first + _PARTS_AT_ONCE, header.num_parts))
            for reply in self._redis.execute([("GET", part_key(self.key, header.number, part)) for part in some]):
                part = raised(reply)
                if not isinstance(part, bytes):
                    self._miss(header)
                    return None
                parts.append(part)
        self._missing_since_s.pop(header.number, None)
        return b"".join(parts)

    def _miss(self, header: Header) -> None:
        since_s = self._missing_since_s.setdefault(header.number, time.monotonic())
        if time.monotonic() - since_s > _INCOMPLETE_S:
            raise TransportError(
                f"parts of message {header.number} of the stream {self.key} are gone: does this Redis remove keys when "
                "its memory is full (maxmemory-policy)? Set it to noeviction"
            )


class OrderedReader:
    """Every message of a stream once, and in order, through all that Redis forgets. Its calls block: one thread."""

    def __init__(self, reader: GroupReader, *, read_ahead: int = _READ_AHEAD) -> None:
        """So many messages are fetched at once, where so many are there."""
        self.reader, self._read_ahead = reader, read_ahead
        self._last = 0
        """The number of the last message that was given out."""
        self._ahead: dict[int, Entry] = {}
        self._times_connected = 0
        """At the last look at what it was given, and may never have received."""
        self._done: list[Entry] = []
        self._gap_since_s: float | None = None

    def next(self, wait_s: float = 1.0) -> Entry | None:
        """The next message, if one comes within so long. Raises as `GroupReader.read`, and where one is gone."""
        if not self._ahead or self._gap_since_s is not None:
            self._read(wait_s)
        if not self._ahead:
            return None
        entry = self._ahead.pop(self._last + 1, None)
        if entry is None:
            self._wait_for_gap(self._last + 1)
            return None
        self._last, self._gap_since_s = entry.number, None
        self.reader.known = entry.number
        return entry

    def acknowledge(self, *entries: Entry) -> None:
        """They need not be read again: Redis is told when more is read."""
        self._done += entries

    def _read(self, wait_s: float) -> None:
        done, self._done = self._done, []
        entries = self.reader.read(self._read_ahead, wait_s, done=done)
        was_away = self.reader.times_connected != self._times_connected
        if was_away or self.reader.misses or self._gap_since_s is not None:
            times_connected = self.reader.times_connected
            entries += self.reader.reclaim()
            self._times_connected = times_connected
        self._ahead |= {entry.number: entry for entry in entries}

    def _wait_for_gap(self, number: int) -> None:
        """A later message is there, and this one is not: its writer may be about to write it again."""
        now_s = time.monotonic()
        self._gap_since_s = self._gap_since_s or now_s
        if now_s - self._gap_since_s > _INCOMPLETE_S:
            raise TransportError(
                f"message {number} of the stream {self.reader.key} is gone from Redis, and nobody writes it again: was "
                "the stream trimmed or deleted by hand?"
            )


def _entries(reply: Reply) -> list[tuple[bytes, object]]:
    """Ids and fields, out of what Redis answers."""
    assert isinstance(reply, list)
    return [(entry[0], entry[1]) for entry in reply]  # type: ignore[index, misc]


def _after(entry_id: bytes) -> str:
    """The least id above that one.

    >>> _after(b"1700000000000-4")
    '1700000000000-5'
    """
    time_ms, _, sequence = entry_id.decode().partition("-")
    return f"{time_ms}-{int(sequence) + 1}"
