"""Promises of streams: every message once and in order, and again to a reader that may not have heard of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.transport.redis import entries
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import Command, RedisConnection, Reply
from tailrace.transport.redis.entries import Entry, Header
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.redis.streams import GroupReader, OrderedReader, Origin, StreamWriter
from tests.support.redis_servers import ask, needs_redis, place_of

pytestmark = needs_redis

LARGE = bytes(range(256)) * 10_000
"""More than one part."""


class Ends:
    """A writer and readers of one stream, each with a connection of its own."""

    def __init__(self, server: RedisServer, **about: str | float) -> None:
        self.place: RedisPlace = place_of(server, **about)  # type: ignore[arg-type]
        self.server, self.key = server, f"tailrace:{self.place.origin.run}:stream"
        self.connections: list[RedisConnection] = []
        self.writer = StreamWriter(self.connect(), self.key, self.place.origin)

    def connect(self) -> RedisConnection:
        self.connections.append(self.place.connect())
        return self.connections[-1]

    def reader(self) -> GroupReader:
        return GroupReader(self.connect(), self.key, "reader", self.place.origin)

    def ordered(self) -> OrderedReader:
        return OrderedReader(self.reader())

    def write(self, *texts: str) -> None:
        self.writer.append([("text", text.encode()) for text in texts])


@pytest.fixture
def ends(server: RedisServer) -> Iterator[Ends]:
    made = Ends(server)
    yield made
    for connection in made.connections:
        connection.close()


def read(reader: OrderedReader, count: int) -> list[str]:
    """So many messages, acknowledged; fails where they do not come."""
    texts: list[str] = []
    for _ in range(300):
        if len(texts) == count:
            return texts
        if (entry := reader.next(0.1)) is not None:
            reader.acknowledge(entry)
            texts.append(entry.data.decode())
    raise AssertionError(f"only {texts} came")


def nothing(reader: OrderedReader) -> bool:
    return all(reader.next(0.05) is None for _ in range(3))


def test_messages_come_in_order_and_once_and_go_when_they_are_released(ends: Ends) -> None:
    reader = ends.ordered()
    ends.write("one", "two")
    ends.write("three")
    assert read(reader, 3) == ["one", "two", "three"]
    assert nothing(reader)
    assert ask(ends.server, "XLEN", ends.key) == 3  # acknowledged, and not yet released
    ends.writer.release(2)
    assert ask(ends.server, "XLEN", ends.key) == 1
    ends.writer.release(3)
    assert ask(ends.server, "XLEN", ends.key) == 0
    ends.write("four")
    assert read(reader, 1) == ["four"]


def test_a_large_message_lies_in_bounded_parts_that_go_with_it(ends: Ends) -> None:
    ends.writer.append([("large", memoryview(LARGE)), ("small", b"x")])
    reader = ends.ordered()
    entry = reader.next(1.0)
    assert entry is not None
    assert (entry.kind, entry.data) == ("large", LARGE)
    parts = ask(ends.server, "KEYS", f"{ends.key}:1.*")
    assert isinstance(parts, list)
    assert len(parts) == 3
    ends.writer.release(1)
    assert ask(ends.server, "KEYS", f"{ends.key}:*") == []
    small = reader.next(1.0)
    assert small is not None
    assert small.data == b"x"


def test_a_part_that_is_refused_while_what_follows_it_is_taken_is_written_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ReadOnlyError

    once, refused = RedisConnection._once, list[Command]()

    def refusing(self: RedisConnection, commands: Sequence[Command], waits_s: float) -> list[Reply]:
        """As by a Redis that stops being read-only between the first command and the second."""
        if refused or commands[0][0] != "SET":
            return once(self, commands, waits_s)
        refused.append(commands[0])
        return [ReadOnlyError("You can't write"), *once(self, [("PING",), *commands[1:]], waits_s)[1:]]

    monkeypatch.setattr(RedisConnection, "_once", refusing)
    ends.writer.append([("large", memoryview(LARGE))])
    entry = ends.ordered().next(1.0)
    assert entry is not None
    assert (entry.data, len(refused)) == (LARGE, 1)


def test_a_reader_that_comes_back_is_given_what_it_has_not_acknowledged_and_what_is_new(ends: Ends) -> None:
    ends.write(*map(str, range(6)))
    before, after = ends.reader(), ends.reader()
    held: list[Entry] = before.read(3) or before.read(3)
    taken = after.read(3) or after.read(3)
    assert [entry.number for entry in [*held, *taken]] == [1, 2, 3, 4, 5, 6]
    before.acknowledge(held[:1])
    assert [entry.number for entry in after.reclaim() if entry not in taken] == [2, 3]
    after.acknowledge([*taken, *held])
    assert after.reclaim() == []


@pytest.mark.parametrize("after_flush", [True, False])
def test_what_redis_forgets_is_written_again_and_nothing_comes_twice(ends: Ends, after_flush: bool) -> None:
    reader = ends.ordered()
    ends.write("one", "two", "three")
    assert read(reader, 2) == ["one", "two"]
    ends.writer.release(1)
    ask(ends.server, "FLUSHALL" if after_flush else "DEL", *([] if after_flush else [ends.key]))
    assert ends.writer.restore() is True
    assert ends.writer.restore() is False
    ends.write("four")
    assert read(reader, 2) == ["three", "four"]
    assert nothing(reader)
    assert ends.writer.times_restored == 1


def test_a_flush_that_the_next_message_meets_loses_nothing(ends: Ends) -> None:
    reader = ends.ordered()
    ends.write("one", "two")
    ask(ends.server, "FLUSHALL")
    ends.write("three")
    assert read(reader, 3) == ["one", "two", "three"]


@pytest.mark.parametrize("then", [b"five", LARGE], ids=["small", "large"])
def test_a_restart_without_data_and_a_failover_that_loses_the_end_lose_nothing(ends: Ends, then: bytes) -> None:
    reader = ends.ordered()
    ends.write("one", "two")
    assert read(reader, 1) == ["one"]
    ask(ends.server, "SAVE")  # what a replica knows
    ends.writer.append([("text", b"three"), ("large", LARGE)])
    ends.server.kill()
    ends.server.start()
    ends.writer.append([("next", then)])
    assert read(reader, 2) == ["two", "three"]
    for number, data in ((4, LARGE), (5, then)):
        entry = reader.next(1.0)
        assert entry is not None
        reader.acknowledge(entry)
        assert (entry.number, entry.data) == (number, data)
    assert nothing(reader)


def test_a_message_whose_reader_lost_its_connection_as_it_was_given_comes_on_the_next(ends: Ends) -> None:
    reader = ends.ordered()
    ends.write("one", "two")
    assert read(reader, 1) == ["one"]
    ends.write("three")
    assert [entry.data for entry in ends.reader().read()] == [b"three"]  # what the same consumer was told is lost
    assert read(reader, 1) == ["two"]
    assert nothing(reader)
    ask(ends.server, "CLIENT", "KILL", "TYPE", "normal")
    assert read(reader, 1) == ["three"]
    assert nothing(reader)


def test_a_writer_waits_through_an_outage(ends: Ends) -> None:
    reader = ends.ordered()
    ends.write("one")
    ends.server.kill()
    writing = threading.Thread(target=ends.write, args=["two"])
    writing.start()
    writing.join(0.3)
    assert writing.is_alive()
    ends.server.start()
    writing.join(60)
    assert read(reader, 2) == ["one", "two"]


def test_a_writer_waits_while_redis_has_no_memory(ends: Ends) -> None:
    reader = ends.ordered()
    ends.write("one")
    ask(ends.server, "CONFIG", "SET", "maxmemory", "1")
    writing = threading.Thread(target=ends.write, args=["two"])
    writing.start()
    writing.join(0.3)
    assert writing.is_alive()
    ask(ends.server, "CONFIG", "SET", "maxmemory", "0")
    writing.join(60)
    assert read(reader, 2) == ["one", "two"]


def test_an_outage_that_lasts_names_its_cause(server: RedisServer) -> None:
    ends = Ends(server, outage_s=0.2)
    ends.write("one")
    server.kill()
    with pytest.raises(TransportError, match=r"was away for 0.2 s \(transport.redis.outage_s\), at last because of: "):
        ends.write("two")


def test_closing_wakes_whoever_reads(ends: Ends) -> None:
    ends.write("one")
    reader = ends.ordered()
    assert read(reader, 1) == ["one"]
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            reader.next(60.0)
        except PeerGone as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    ends.connections[-1].close()
    waiting.join(30)
    assert len(raised) == 1


def test_entries_of_another_epoch_and_run_are_ignored_and_counted(ends: Ends) -> None:
    zombie = StreamWriter(ends.connect(), ends.key, Origin(ends.place.origin.run, "earlier"))
    other = StreamWriter(ends.connect(), ends.key, Origin("another-run", ends.place.origin.epoch))
    zombie.append([("text", b"old"), ("large", LARGE)])
    ends.write("one")
    other.append([("text", b"foreign")])
    zombie.append([("text", b"old")])
    ends.write("two")
    reader = ends.ordered()
    assert read(reader, 2) == ["one", "two"]
    assert nothing(reader)
    assert reader.reader.num_ignored == 4


HOLDING = """
import sys
from tailrace.transport.redis.connection import Command, RedisConnection, Reply
from tailrace.transport.redis.streams import GroupReader, Origin
url, key, run, epoch = sys.argv[1:]
reader = GroupReader(RedisConnection(url), key, "reader", Origin(run, epoch))
entries = []
while len(entries) < 3:
    entries += reader.read(3 - len(entries))
reader.acknowledge(entries[:1])
print(*(entry.number for entry in entries), flush=True)
sys.stdin.read()
"""


def test_what_a_process_held_that_was_killed_is_reclaimed_by_the_same_reader_in_another(ends: Ends) -> None:
    ends.write(*map(str, range(6)))
    origin = ends.place.origin
    command = [sys.executable, "-c", HOLDING, ends.server.url, ends.key, origin.run, origin.epoch]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"1 2 3\n"
        dying.kill()
    living = ends.reader()
    assert [entry.number for entry in living.reclaim()] == [2, 3]
    assert [entry.number for entry in living.read(10)] == [4, 5, 6]
    ends.writer.release(6)
    assert ask(ends.server, "XLEN", ends.key) == 0


def header_of(ends: Ends, **changes: object) -> bytes:
    made = {
        **{"schema": entries.SCHEMA, "run": ends.place.origin.run, "epoch": ends.place.origin.epoch, "number": 1},
        **{"kind": "text", "num_bytes": 3, "num_parts": 0, "xxh3": "x"},
        **changes,
    }
    return msgspec.json.encode(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2, newer than this Tailrace's 1"),
        ({"schema": 0, "number": "x"}, "schema 0, older than this Tailrace's 1"),
        ({"num_bytes": 4}, r"message 1 of the stream .* is damaged"),
        ({}, "checksum differs"),
        ({"number": 0}, "is impossible"),
        ({"num_parts": 1 << 40}, "is impossible"),
        ({"num_bytes": -1}, "is impossible"),
        ({"kind": 3}, "header of an entry"),
        ({"more": 3}, "header of an entry"),
    ],
)
def test_an_entry_of_another_schema_or_that_was_cut_or_flipped_is_named(
    ends: Ends, changes: dict[str, object], message: str
) -> None:
    with contextlib.closing(ends.place.connect()) as connection:
        connection.one("XADD", ends.key, "*", "header", header_of(ends, **changes), "data", b"abc")
    with pytest.raises(CorruptData, match=message):
        ends.ordered().next(10.0)


@pytest.mark.parametrize("fields", [("a", "b"), ("header", "{", "data", "x"), ("header", "x" * 5000, "data", "x")])
def test_an_entry_that_is_none_of_ours_is_named(ends: Ends, fields: tuple[str, ...]) -> None:
    ask(ends.server, "XADD", ends.key, "*", *fields)
    with pytest.raises(CorruptData, match=ends.key):
        ends.ordered().next(1.0)


def test_a_flipped_part_is_noticed(ends: Ends) -> None:
    ends.writer.append([("large", LARGE)])
    ask(ends.server, "SETRANGE", f"{ends.key}:1.1", "5", "x")
    with pytest.raises(CorruptData, match=r"message 1 of the stream .* is damaged"):
        ends.ordered().next(1.0)


def test_a_header_is_readable_json(ends: Ends) -> None:
    ends.write("one")
    reply = ask(ends.server, "XRANGE", ends.key, "-", "+")
    assert isinstance(reply, list)
    fields = reply[0][1]  # type: ignore[index]
    read_back = msgspec.json.decode(fields[1], type=Header)  # type: ignore[index]
    assert (read_back.number, read_back.kind, read_back.epoch) == (1, "text", "this-epoch")
