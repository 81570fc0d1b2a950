"""The orchestrator's end of a stream of samples over Redis.

    offer ─► waits here ─► asked for by a rank: it alone has it now (SamplesTaken) ─► a thread encodes it, and writes it
    reports ◄─ one thread for each rank reads what it tells, each message once and in order
             ◄─ one thread lets ranks in, and tells of those whose lease ran out (ConsumerLost)

Who has which sample is known here, not in Redis: whatever that forgets is written again to the same rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec
from typing_extensions import override

from tailrace.errors import CorruptData, PeerGone, SettingsError, TransportError
from tailrace.guards import guarded
from tailrace.records import (
    ConsumerJoined,
    ConsumerLost,
    ConsumerReport,
    FeedReport,
    FeedSample,
    SampleId,
    SamplesTaken,
    StopRequested,
)
from tailrace.timeouts import timeout
from tailrace.transport.channels import wait_until
from tailrace.transport.redis import sample_messages
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import Command, RedisConnection, raised
from tailrace.transport.redis.entries import Entry
from tailrace.transport.redis.sample_messages import FeedKeys, Join, OpenFeed, Pull
from tailrace.transport.redis.streams import GroupReader, OrderedReader, StreamWriter
from tailrace.transport.samples.codec import SCHEMA, take_document
from tailrace.transport.samples.stream import SampleSender

_CLOSE_S = 5.0
"""How long closing may take, where Redis is away."""
_WAIT_S = 2.0
"""Within which a thread that waits for messages notices that its rank is gone."""
_ENCODER = msgspec.msgpack.Encoder()
_PULLS = msgspec.msgpack.Decoder(Pull)
_REPORTS: msgspec.msgpack.Decoder[ConsumerReport] = msgspec.msgpack.Decoder(ConsumerReport)
_JOINS = msgspec.msgpack.Decoder(Join)


@dataclass(eq=False, slots=True)
class _Rank:
    """One that was let in. `seen_s` and `heard` are of threads, the rest is of the event loop."""

    name: str
    token: str
    writer: StreamWriter
    listening: RedisConnection
    reader: GroupReader
    seen_s: float
    room: int = 0
    """Samples that it asked for and was not given."""
    has: set[SampleId] = field(default_factory=set)
    """That it was given, and nobody released."""
    outbox: deque[FeedSample] = field(default_factory=deque)
    """Of these, what is not written yet: the event loop adds to it, and the thread that writes takes."""
    heard: int = 0
    told_ignored: int = 0
    """Entries of other runs and epochs that it passed over."""
    has_left: bool = False
    """It said so, and waits for nothing but to be heard."""
    is_gone: bool = False

    @property
    def num_ignored(self) -> int:
        """By it, and of those that seemed to come from it."""
        return self.told_ignored + self.reader.num_ignored


class RedisSampleSender(SampleSender):
    """Make it on a running event loop. Ranks find it by the run's name."""

    def __init__(self, place: RedisPlace, *, lease_s: float = 20.0) -> None:
        """A rank that says nothing for `lease_s` is lost."""
        self._place, self._origin, self._lease_s = place, place.origin, lease_s
        self._keys = FeedKeys(place.prefix, place.origin.run)
        self._loop = asyncio.get_running_loop()
        self._offered: dict[SampleId, FeedSample] = {}
        self._ranks: dict[str, _Rank] = {}
        self._reports: deque[FeedReport] = deque()
        self._stop: StopRequested | None = None
        self._failure: TransportError | SettingsError | None = None
        self._closed: str | None = None
        self._changed = asyncio.Event()
        self._writing, self._watching = place.connect(), place.connect()
        self._counted_at = 0
        """Of the connection's times, when leases were last counted: a rank renews nothing while Redis is away."""
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="tailrace-samples")
        self._ending = threading.Event()
        self._joins = GroupReader(self._watching, self._keys.joins, "orchestrator", self._origin)
        self._restored_of_lost = self._ignored_of_lost = 0
        place.count(self)
        self._start(self._watch, "tailrace-ranks")

    # --- the orchestrator's end --------------------------------------------------------------------------------------

    @override
    async def offer(self, samples: Sequence[FeedSample]) -> None:
        self._require_open()
        for sample in samples:
            self._offered.setdefault(sample.sample_id, sample)
        self._hand_out()

    @override
    async def release(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._offered.pop(sample_id, None)
        for rank in self._ranks.values():
            rank.has.difference_update(sample_ids)

    @override
    async def reports(self) -> AsyncIterator[FeedReport]:
        while True:
            await wait_until(self._changed, lambda: bool(self._reports or self._failure) or self._closed is not None)
            if self._reports:
                yield self._reports.popleft()
            elif self._closed is not None:
                return
            else:
                self._require_open()

    @override
    async def request_stop(self, stop: StopRequested) -> None:
        if self._stop is None:
            self._stop = stop
            for rank in self._ranks.values():
                self._tell(rank, sample_messages.STOP, _ENCODER.encode(stop))

    @override
    async def close(self, reason: str = "") -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._changed.set()
        with contextlib.suppress(TimeoutError, TransportError, SettingsError):
            async with timeout(_CLOSE_S):
                await self._loop.run_in_executor(self._writes, self._tell_end, [*self._ranks.values()], reason)
        self._ending.set()
        for connection in (self._writing, self._watching, *(rank.listening for rank in self._ranks.values())):
            connection.close()
        self._writes.shutdown(wait=False)

    @property
    def times_restored(self) -> int:
        """How often Redis had lost something that was for a rank."""
        return self._restored_of_lost + sum(rank.writer.times_restored for rank in self._ranks.values())

    @property
    def num_ignored(self) -> int:
        """Entries of other runs and epochs, passed over here or by ranks, as far as these have told."""
        return self._joins.num_ignored + self._ignored_of_lost + sum(rank.num_ignored for rank in self._ranks.values())

    # --- handing out, on the event loop ------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """What is offered goes to ranks with room, the oldest offers to who asked first."""
        for rank in self._ranks.values():
            if self._stop is None and rank.room > 0 and self._offered:
                ids = [*itertools.islice(self._offered, rank.room)]
                samples = [self._offered.pop(sample_id) for sample_id in ids]
                rank.room -= len(ids)
                rank.has.update(ids)
                rank.outbox += samples
                self._report(SamplesTaken(consumer=rank.name, sample_ids=tuple(ids)))
                self._in_thread(partial(self._write_samples, rank))

    def _join(self, join: Join) -> None:
        """Let a rank in, that has its name."""
        known = self._ranks.get(join.name)
        if known is not None and known.token == join.token:
            return  # it asked again before it heard the answer
        if known is not None:
            self._lose(known, "another rank has its name now")
        writer = StreamWriter(self._writing, self._keys.down(join.token), self._origin)
        listening = self._place.connect()
        reader = GroupReader(listening, self._keys.up(join.token), "orchestrator", self._origin)
        rank = _Rank(join.name, join.token, writer, listening, reader, time.monotonic())
        self._ranks[join.name] = rank
        self._in_thread(partial(self._welcome, rank))
        if self._stop is not None:
            self._tell(rank, sample_messages.STOP, _ENCODER.encode(self._stop))
        self._report(ConsumerJoined(consumer=rank.name))
        self._start(partial(self._listen, rank), f"tailrace-rank-{rank.name}")

    def _hear(self, rank: _Rank, message: Pull | ConsumerReport | None) -> None:
        """A message of a rank, or None: it left."""
        if rank.is_gone:
            return
        if isinstance(message, Pull):
            rank.room += message.count
            rank.told_ignored = message.ignored
            # Who asked last comes last: ranks in the order of what they asked for.
            self._ranks[rank.name] = self._ranks.pop(rank.name)
            self._hand_out()
            self._in_thread(partial(rank.writer.release, message.seen))
        elif message is None:
            rank.has_left = True
            self._lose(rank, "left")
        elif message.consumer != rank.name:
            self._fail(CorruptData(f"the rank {rank.name!r} reports as {message.consumer!r}"))
        else:
            self._report(message)

    def _lose(self, rank: _Rank, reason: str) -> None:
        if rank.is_gone:
            return
        rank.is_gone = True
        del self._ranks[rank.name]
        self._restored_of_lost += rank.writer.times_restored
        self._ignored_of_lost += rank.num_ignored
        rank.listening.close()
        self._in_thread(partial(self._forget, rank))
        self._report(ConsumerLost(consumer=rank.name, reason=reason, sample_ids=tuple(sorted(rank.has))))

    def _report(self, report: FeedReport) -> None:
        self._reports.append(report)
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        if self._failure is None and self._closed is None:
            if not isinstance(error, TransportError | SettingsError):
                error = TransportError(f"the stream of samples failed: {error!r}")
            self._failure = error
            self._changed.set()

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed is not None:
            raise PeerGone(f"the stream of samples is closed{self._closed and ': '}{self._closed}")

    def _tell(self, rank: _Rank, kind: str, data: bytes = b"") -> None:
        self._in_thread(partial(rank.writer.append, [(kind, data)]))

    # --- threads -----------------------------------------------------------------------------------------------------

    def _in_thread(self, work: Callable[[], object]) -> None:
        """Do this in the thread that writes, after all that it was given before."""

        def guarded_work() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the event loop raises it
                self._on_loop(self._fail, error)

        if self._closed is None:
            self._writes.submit(guarded_work)

    def _start(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who would want it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _welcome(self, rank: _Rank) -> None:
        # In this order: a rank of which nothing is said after its welcome takes itself for given up.
        self._writing.execute([self._heard(rank)])
        rank.writer.append([(sample_messages.WELCOME, b"")])

    def _write_samples(self, rank: _Rank) -> None:
        """All that is ready by now, in as few documents as hold it; what became ready while they were written, too."""
        run, epoch = self._origin.run, self._origin.epoch
        while rank.outbox and not rank.is_gone:
            document = take_document(rank.outbox, run=run, epoch=epoch)
            rank.writer.append([(sample_messages.SAMPLES, document)])

    def _forget(self, rank: _Rank) -> None:
        """One that goes on after a pause learns so: nobody says any more that it was heard."""
        rank.writer.expire(4 * self._lease_s)
        if not rank.has_left:
            self._writing.execute([("UNLINK", self._keys.heard(rank.token))])

    def _tell_end(self, ranks: Sequence[_Rank], reason: str) -> None:
        self._writing.execute([("UNLINK", self._keys.open, self._keys.joins)])
        for rank in ranks:
            rank.writer.append([(sample_messages.CLOSED, reason.encode())])
            rank.writer.expire(4 * self._lease_s)

    def _listen(self, rank: _Rank) -> None:
        """The thread of one rank: hands what it tells to the event loop."""
        reader = OrderedReader(rank.reader)
        try:
            while not (rank.is_gone or self._ending.is_set()):
                if (entry := reader.next(_WAIT_S)) is None:
                    continue
                reader.acknowledge(entry)
                rank.heard = entry.number
                if entry.kind == sample_messages.LEFT:  # it waits for this alone
                    rank.listening.execute([self._heard(rank)])
                if entry.kind != sample_messages.HELLO:
                    self._on_loop(self._hear, rank, _message(rank.name, entry))
        except Exception as error:  # noqa: BLE001 - the event loop raises it
            if not (rank.is_gone or self._ending.is_set()):
                self._on_loop(self._fail, error)

    def _watch(self) -> None:
        """The thread that lets ranks in, and counts their leases."""
        joins = self._joins
        try:
            self._watching.execute(
                [("UNLINK", self._keys.joins), ("XGROUP", "CREATE", self._keys.joins, joins.group, "0", "MKSTREAM")]
            )
            while self._closed is None:
                self._count_leases()
                for entry in joins.read(16, self._lease_s / 4):
                    with guarded("a rank that wants to join says nothing that is known"):
                        self._on_loop(self._join, _JOINS.decode(entry.data))
                    joins.acknowledge([entry])
        except Exception as error:  # noqa: BLE001 - the event loop raises it
            if not self._ending.is_set():
                self._on_loop(self._fail, error)

    def _heard(self, rank: _Rank) -> Command:
        """Says how far a rank was heard, which lets go of it then."""
        return ("SET", self._keys.heard(rank.token), rank.heard, "PX", int(4000 * self._lease_s))

    def _count_leases(self) -> None:
        """Renew the run's own, say what was heard, write again what Redis lost, and find who renews its own no more."""
        ranks = [*self._ranks.values()]
        encoded = msgspec.json.encode(OpenFeed(SCHEMA, self._origin.epoch, self._lease_s))
        replies = self._watching.execute(
            [
                ("SET", self._keys.open, encoded, "PX", int(self._lease_s * 1000)),
                *map(self._heard, ranks),
                *(("GET", self._keys.name(rank.name)) for rank in ranks),
            ]
        )
        for rank in ranks:
            self._in_thread(rank.writer.restore)
        now_s, holders = time.monotonic(), map(raised, replies[1 + len(ranks) :])
        was_away = self._counted_at != self._watching.times_connected
        self._counted_at = self._watching.times_connected
        for rank, holder in zip(ranks, holders, strict=True):
            if holder == rank.token.encode() or was_away:
                rank.seen_s = now_s
            elif holder is not None:
                self._on_loop(self._lose, rank, "another rank has its name now")
            elif now_s - rank.seen_s > self._lease_s:
                self._on_loop(self._lose, rank, f"it said nothing for {self._lease_s:g} s")


def _message(name: str, entry: Entry) -> Pull | ConsumerReport | None:
    """Raises `CorruptData` for what no rank tells."""
    with guarded(f"a message of the rank {name!r} is not what was agreed on"):
        match entry.kind:
            case sample_messages.PULL:
                return _PULLS.decode(entry.data)
            case sample_messages.REPORT:
                return _REPORTS.decode(entry.data)
            case sample_messages.LEFT:
                return None
    raise CorruptData(f"a message of the rank {name!r} is of an unknown kind {entry.kind[:40]!r}")
