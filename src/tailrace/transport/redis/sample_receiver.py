"""A rank's end of a stream of samples over Redis. Blocking: a trainer outside has no event loop.

    RedisSampleReceiver(url, run, name) ── waits for the run, takes the name, joins ──► welcome
    pull ── asks for what it has room for, reads what comes ──► samples, or the request to stop

A thread of its own renews the name, and notices that the run is gone, or that this rank was given up.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator

import msgspec

from tailrace.errors import ConsumerRefused, CorruptData, OtherSchema, PeerGone, TailraceError, TransportError
from tailrace.guards import guarded
from tailrace.records import ConsumerReport, StopRequested, StreamedSample
from tailrace.transport.redis import sample_messages
from tailrace.transport.redis.connection import RedisConnection, require_redis
from tailrace.transport.redis.entries import Entry, Message
from tailrace.transport.redis.leases import RENEWALS, Attempt, Lease
from tailrace.transport.redis.sample_messages import FeedKeys, Join, OpenFeed, Pull
from tailrace.transport.redis.streams import GroupReader, OrderedReader, Origin, StreamWriter
from tailrace.transport.samples.codec import SCHEMA, decode_samples

_logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""Within which a wait notices what another thread found."""
_LOOK_S = 0.2
"""Between two looks for a run that is not there yet, or for a name that may become free."""
_LET_IN_S = 300.0
"""Within which a run that is there lets a rank in: its event loop may be busy."""
_READ_AHEAD = 4
"""Documents that are fetched at once."""
_ENCODER = msgspec.msgpack.Encoder()


class RedisSampleReceiver:
    """One rank. Its calls come from one thread at a time; they wait through outages of Redis."""

    def __init__(
        self,
        url: str,
        run: str,
        name: str,
        *,
        prefix: str = "tailrace",
        patience_s: float = 300.0,
        outage_s: float = 60.0,
    ) -> None:
        """Wait for the run to be there for `patience_s` at most, and join it as `name`.

        Raises `SettingsError` for a wrong address, user, password or TLS, `PeerGone` where no such run is there,
        `OtherSchema` where another version of Tailrace feeds it, and `ConsumerRefused` where another rank that lives
        has this name.
        """
        self.name = name
        self._token, self._keys, self._run = uuid.uuid4().hex, FeedKeys(prefix, run), run
        self._connections = [RedisConnection(url, outage_s=outage_s) for _ in range(3)]
        self._writing, reading, self._keeping = self._connections
        self._failure: TailraceError | None = None
        self._stop: StopRequested | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._asked = self._seen = 0
        self._ready: deque[StreamedSample] = deque()
        """Read, and more than a `pull` asked for."""
        try:
            require_redis(url)
            self._open = self._wait_for_run(patience_s)
            origin = Origin(run, self._open.epoch)
            self._writer = StreamWriter(self._writing, self._keys.up(self._token), origin)
            group = GroupReader(reading, self._keys.down(self._token), "rank", origin)
            self._reader = OrderedReader(group, read_ahead=_READ_AHEAD)
            self._lease = Lease(self._keeping, self._keys.name(name), self._token, self._open.lease_s)
            self._take_name()
            self._keeper = threading.Thread(target=self._keep, name=f"tailrace-lease-{name}", daemon=True)
            self._keeper.start()
            self._join()
        except BaseException:
            self._close()
            raise

    @property
    def epoch(self) -> str:
        """Of the start of the run that it belongs to."""
        return self._open.epoch

    @property
    def num_ignored(self) -> int:
        """Entries of another run or epoch that were passed over."""
        return self._reader.reader.num_ignored

    def pull(self, at_most: int) -> list[StreamedSample] | StopRequested:
        """Wait for samples that nobody else was given; the oldest offers first, one or more.

        Where a request to stop is there it is returned at once, and samples stay where they are. Raises `PeerGone` when
        the stream ended, `ConsumerRefused` when this end was given up, and `CorruptData` or `OtherSchema` for a sample
        that cannot be read.
        """
        self._require_alive()
        if self._stop is None and at_most > self._asked + len(self._ready):
            more = at_most - self._asked - len(self._ready)
            self._tell(sample_messages.PULL, Pull(more, self._seen, self.num_ignored))
            self._asked += more
        entries: list[Entry] = []
        while self._stop is None and len(self._ready) < at_most:
            entry = self._next(0.0 if self._ready else _WAIT_S)
            if entry is None and self._ready:
                break
            if entry is not None:
                entries.append(entry)
                self._take(entry)
        self._reader.acknowledge(*entries)
        return self._stop or [self._ready.popleft() for _ in range(min(at_most, len(self._ready)))]

    def report(self, report: ConsumerReport) -> None:
        """Tell the orchestrator; returns once it is certain to arrive. Raises as `pull` does."""
        self._require_alive()
        self._tell(sample_messages.REPORT, report)

    def leave(self) -> None:
        """This rank will take nothing more: what it has and no step was told of goes to others.

        Returns once all that was told was heard, or after a lease in which it was not. Leaving twice does nothing.
        """
        if self._ended.is_set() or self._failure is not None:
            self._close()
            return
        self._ended.set()
        giving_up = threading.Timer(self._open.lease_s, self._close)
        giving_up.start()
        try:
            self._tell_left()
        except TransportError as error:
            _logger.warning("the rank %r left before run %r heard all that it told: %s", self.name, self._run, error)
        finally:
            giving_up.cancel()
            self._close()

    def _tell_left(self) -> None:
        self._keeper.join()  # its connection is this thread's from now on
        last = self._tell(sample_messages.LEFT)
        while not self._hears(last):
            time.sleep(_LOOK_S / 4)
        self._writer.expire(4 * self._open.lease_s)
        self._lease.give_back()

    def _hears(self, number: int) -> bool:
        """Whether so many messages were heard, or nobody is left who could."""
        self._writer.restore()
        heard = self._heard()
        if heard is not None and heard >= number:
            return True
        found = self._read_open()
        return found is None or found.epoch != self.epoch

    def _heard(self) -> int | None:
        """How far the run has heard this rank; None where it does not say so, or no more."""
        heard = self._keeping.one("GET", self._keys.heard(self._token))
        return int(heard) if isinstance(heard, bytes) and heard.isdigit() else None

    # --- joining -----------------------------------------------------------------------------------------------------

    def _wait_for_run(self, patience_s: float) -> OpenFeed:
        nobody = f"no run called {self._run!r} feeds a trainer through Redis at {self._keeping.place}"
        for _ in _until(patience_s, nobody):
            if (found := self._read_open()) is not None:
                return found
            time.sleep(_LOOK_S)
        raise AssertionError("ends above")

    def _read_open(self) -> OpenFeed | None:
        """What the run says of itself, if it is there."""
        content = self._keeping.one("GET", self._keys.open)
        if not isinstance(content, bytes):
            return None
        with guarded(f"{self._keys.open} does not tell of a run"):
            found = msgspec.json.decode(content, type=OpenFeed)
        if found.schema != SCHEMA:
            raise OtherSchema(
                f"run {self._run!r} hands out samples of schema {found.schema}, and this Tailrace reads schema "
                f"{SCHEMA}: install the same version on both sides"
            )
        return found

    def _take_name(self) -> None:
        """Wait for a lease that a rank left behind when it died: the name of one that renews it stays taken."""
        while (attempt := self._lease.attempt()) is not Attempt.TAKEN:
            if attempt is Attempt.RENEWED:
                raise ConsumerRefused(
                    f"run {self._run!r} has a rank called {self.name!r} already, which lives: give every rank a name of"
                    " its own"
                )
            time.sleep(_LOOK_S)

    def _join(self) -> None:
        self._tell(sample_messages.HELLO)
        data = _ENCODER.encode(Join(self.name, self._token))
        header = Message(1, "join", data).header(self._run, self.epoch)
        refused = f"run {self._run!r} did not let the rank {self.name!r} in within {_LET_IN_S:g} s"
        for _ in _until(_LET_IN_S, refused):
            with self._lock:
                self._writing.one("XADD", self._keys.joins, "*", "header", header, "data", data)
            if (entry := self._next(_WAIT_S)) is not None:
                self._take(entry)
                self._reader.acknowledge(entry)
                return

    # --- messages ----------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, message: msgspec.Struct | None = None) -> int:
        """The number that it has among all messages of this rank."""
        with self._lock:
            return self._writer.append([(kind, b"" if message is None else _ENCODER.encode(message))])

    def _next(self, wait_s: float) -> Entry | None:
        """The next message, if one comes within so long."""
        self._require_alive()
        entry = self._reader.next(wait_s)
        if entry is not None:
            self._seen = entry.number
        return entry

    def _take(self, entry: Entry) -> None:
        """What it brings."""
        match entry.kind:
            case sample_messages.SAMPLES:
                samples = decode_samples(entry.data, name=f"document {entry.number} for {self.name!r}")
                self._ready += map(self._checked, samples)
                self._asked -= len(samples)
            case sample_messages.STOP:
                with guarded("a request to stop is not what was agreed on"):
                    self._stop = msgspec.msgpack.decode(entry.data, type=StopRequested)
            case sample_messages.CLOSED:
                reason = entry.data.decode(errors="replace")
                raise self._fail(PeerGone(f"run {self._run!r} ended{reason and ': '}{reason}"))
            case sample_messages.WELCOME:
                pass
            case kind:
                raise CorruptData(f"a message for the rank {self.name!r} is of an unknown kind {kind[:40]!r}")

    def _checked(self, sample: StreamedSample) -> StreamedSample:
        if (sample.origin.run, sample.origin.epoch) != (self._run, self.epoch):
            raise CorruptData(
                f"the sample {sample.sample_id} is of run {sample.origin.run!r}, epoch {sample.origin.epoch}, and lies "
                f"among those of run {self._run!r}, epoch {self.epoch}"
            )
        return sample

    # --- staying -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """The thread: renews the lease, lets go of what was heard, and watches over the run."""
        seen_s = time.monotonic()
        try:
            while not self._ended.wait(self._open.lease_s / RENEWALS):
                times_connected = self._keeping.times_connected
                gone = self._renew()
                if gone is None or times_connected != self._keeping.times_connected:
                    seen_s = time.monotonic()
                elif time.monotonic() - seen_s > self._open.lease_s:
                    raise gone
        except Exception as error:  # noqa: BLE001 - whoever calls next gets it
            if not self._ended.is_set():
                self._fail(error if isinstance(error, TailraceError) else PeerGone(f"the lease ended: {error!r}"))

    def _renew(self) -> TransportError | None:
        """What is wrong where that lasts for a lease; a Redis that lost its data is told again before."""
        if self._lease.attempt() is not Attempt.TAKEN:
            raise ConsumerRefused(f"the rank {self.name!r} was given up, and another one has its name: join again")
        found, heard = self._read_open(), self._heard()
        with self._lock:
            self._writer.restore()
            self._writer.release(heard or 0)
        if found is None:
            return PeerGone(f"run {self._run!r} fell silent for {self._open.lease_s:g} s")
        if found.epoch != self.epoch:
            raise PeerGone(f"run {self._run!r} was started again (epoch {found.epoch}): join again")
        if heard is None:
            return ConsumerRefused(f"run {self._run!r} gave the rank {self.name!r} up: join again")
        return None

    def _fail(self, error: TailraceError) -> TailraceError:
        self._failure = self._failure or error
        return self._failure

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended.is_set():
            raise PeerGone(f"the rank {self.name!r} has left")

    def _close(self) -> None:
        self._ended.set()
        for connection in self._connections:
            connection.close()


def _until(patience_s: float, why_it_ended: str) -> Iterator[None]:
    """Again and again; raises `PeerGone` at the end of patience."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        yield
    raise PeerGone(why_it_ended)
