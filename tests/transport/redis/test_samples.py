"""Samples over a real Redis, from the orchestrator to ranks of a trainer: each to one of them, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec
import pytest
import redis

from tailrace.errors import ConsumerRefused, CorruptData, OtherSchema, PeerGone, SettingsError, TransportError
from tailrace.records import (
    ConsumerJoined,
    ConsumerLost,
    RunStatus,
    SampleId,
    SamplesDropped,
    SamplesTaken,
    StepDone,
    StopRequested,
    StreamedSample,
)
from tailrace.transport.redis import connection, sample_messages
from tailrace.transport.redis.connection import RedisConnection
from tailrace.transport.redis.entries import Message
from tailrace.transport.redis.sample_messages import FeedKeys, OpenFeed
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.samples.codec import SCHEMA, encode_samples
from tests.support.fed_runs import PATIENCE_S, FedRun, feed_samples
from tests.support.redis_servers import ReplicatedServer, ask, needs_redis
from tests.transport.redis.test_outages import LONG, TROUBLES, away
from tests.transport.samples.test_codec import assert_same_sample

pytestmark = needs_redis

LEASE_S = 3.0
"""In tests of who falls silent; long enough for a busy machine."""
KEYS = FeedKeys("tailrace", "run")


@pytest.fixture
async def run(server: RedisServer) -> AsyncIterator[FedRun]:
    run = FedRun(server)
    yield run
    await run.close()


@pytest.fixture
async def impatient(server: RedisServer) -> AsyncIterator[FedRun]:
    run = FedRun(server, lease_s=LEASE_S)
    yield run
    await run.close()


@pytest.fixture
async def join(server: RedisServer) -> AsyncIterator[Callable[..., Receiver]]:
    joined: list[Receiver] = []

    async def join(name: str = "trainer") -> Receiver:
        joined.append(await Receiver.join(server.url, name))
        return joined[-1]

    yield join
    for receiver in joined:
        await receiver.leave()


class Receiver:
    """A rank, off the event loop."""

    def __init__(self, end: RedisSampleReceiver) -> None:
        self.end = end

    @classmethod
    async def join(cls, url: str, name: str, patience_s: float = PATIENCE_S) -> Receiver:
        return cls(await asyncio.to_thread(RedisSampleReceiver, url, "run", name, patience_s=patience_s))

    async def pull(self, at_most: int) -> list[StreamedSample] | StopRequested:
        return await asyncio.wait_for(asyncio.to_thread(self.end.pull, at_most), PATIENCE_S)

    async def pull_all(self, count: int) -> list[StreamedSample]:
        samples: list[StreamedSample] = []
        while len(samples) < count:
            pulled = await self.pull(count - len(samples))
            assert isinstance(pulled, list)
            samples += pulled
        return samples

    async def report(self, report: StepDone) -> None:
        await asyncio.to_thread(self.end.report, report)

    async def leave(self) -> None:
        with contextlib.suppress(PeerGone):
            await asyncio.wait_for(asyncio.to_thread(self.end.leave), PATIENCE_S)


Join = Callable[..., "asyncio.Future[Receiver]"]


encoded = msgspec.msgpack.encode


def step_done(samples: Sequence[StreamedSample], consumer: str = "trainer") -> StepDone:
    return StepDone(consumer=consumer, step=1, version=1, sample_ids=tuple(one.sample_id for one in samples))


async def test_samples_arrive_as_they_were_offered_the_oldest_first(run: FedRun, join: Join) -> None:
    sent = feed_samples(9)
    receiver = await join()
    await run.sender.offer(sent[:5])
    await run.sender.offer(sent[5:])
    received = await receiver.pull_all(9)
    for one, other in zip(received, sent, strict=True):
        assert_same_sample(one, other)
        assert (one.origin.run, one.origin.epoch) == ("run", "epoch")
    assert run.taken_by("trainer") == [one.sample_id for one in sent]
    assert isinstance(run.told[0], ConsumerJoined)


async def test_a_pull_waits_for_an_offer_and_takes_no_more_than_it_asked_for(run: FedRun, join: Join) -> None:
    receiver = await join()
    pulling = asyncio.create_task(receiver.pull(2))
    await run.hears(ConsumerJoined)
    assert not pulling.done()
    await run.sender.offer(feed_samples(5))
    taken = await pulling
    assert isinstance(taken, list)
    assert 1 <= len(taken) <= 2
    await receiver.pull_all(5 - len(taken))


async def test_no_two_ranks_are_given_one_sample(run: FedRun, join: Join) -> None:
    ranks = [await join(f"rank-{number}") for number in range(3)]
    await run.sender.offer(feed_samples(12))
    pulled = await asyncio.gather(*(rank.pull_all(4) for rank in ranks))
    names = [one.sample_id for samples in pulled for one in samples]
    assert sorted(names) == sorted(one.sample_id for one in feed_samples(12))


async def test_a_sample_that_was_released_is_given_to_nobody(run: FedRun, join: Join) -> None:
    receiver, sent = await join(), feed_samples(3)
    await run.sender.offer(sent)
    await run.sender.release([sent[0].sample_id, SampleId("never")])
    assert [one.sample_id for one in await receiver.pull_all(2)] == [one.sample_id for one in sent[1:]]


async def test_reports_come_in_order_after_what_was_taken(run: FedRun, join: Join) -> None:
    receiver = await join()
    await run.sender.offer(feed_samples(2))
    samples = await receiver.pull_all(2)
    for step in range(1, 6):
        await receiver.report(msgspec.structs.replace(step_done(samples), step=step, metrics={"loss": 0.5}))
    await receiver.leave()
    lost = await run.hears(ConsumerLost)
    steps = [report.step for report in run.told if isinstance(report, StepDone)]
    assert steps == [1, 2, 3, 4, 5]
    assert run.told.index(lost) == len(run.told) - 1
    kinds = [type(report) for report in run.told]
    assert kinds.index(SamplesTaken) < kinds.index(StepDone)
    assert (lost.reason, set(lost.sample_ids)) == ("left", {one.sample_id for one in samples})


async def test_a_request_to_stop_is_what_every_pull_returns(run: FedRun, join: Join) -> None:
    waiting, stop = await join("waiting"), StopRequested(epoch="e", role="you", status=RunStatus.CANCELLED, reason="so")
    pulling = asyncio.create_task(waiting.pull(1))
    await run.hears(ConsumerJoined)
    await run.sender.request_stop(stop)
    assert await pulling == stop
    await run.sender.offer(feed_samples(1))
    assert await waiting.pull(1) == stop
    late = await join("late")
    assert await late.pull(1) == stop


async def test_the_end_of_the_run_reaches_who_waits_with_its_reason(run: FedRun, join: Join) -> None:
    receiver = await join()
    pulling = asyncio.create_task(receiver.pull(1))
    await run.hears(ConsumerJoined)
    await run.close("step 3 was told of twice")
    with pytest.raises(PeerGone, match="step 3 was told of twice"):
        await pulling


async def test_a_second_rank_of_one_name_is_refused_and_the_first_goes_on(
    server: RedisServer, impatient: FedRun, join: Join
) -> None:
    first = await join()
    with pytest.raises(ConsumerRefused, match="'trainer' already, which lives"):
        await Receiver.join(server.url, "trainer")
    await impatient.sender.offer(feed_samples(1))
    assert len(await first.pull_all(1)) == 1


SERVING = """
import asyncio, sys
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.sample_sender import RedisSampleSender
from tailrace.transport.redis.streams import Origin
async def serve():
    sender = RedisSampleSender(RedisPlace(sys.argv[1], Origin("run", "epoch")), lease_s=3.0)
    await asyncio.sleep(1000)
asyncio.run(serve())
"""
PULLING = """
import sys
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver
receiver = RedisSampleReceiver(sys.argv[1], "run", "trainer")
print(len(receiver.pull(1)), flush=True)
try:
    receiver.pull(1)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@contextlib.contextmanager
def program(text: str, server: RedisServer) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", text, server.url], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_what_a_rank_had_that_was_killed_goes_to_who_comes_in_its_place(
    server: RedisServer, impatient: FedRun, join: Join
) -> None:
    sent = feed_samples(1)
    await impatient.sender.offer(sent)
    with program(PULLING, server) as dying:
        assert dying.stdout is not None
        assert await asyncio.to_thread(dying.stdout.readline) == b"1\n"
    lost = await impatient.hears(ConsumerLost)
    assert lost.sample_ids == (sent[0].sample_id,)
    await impatient.sender.release(lost.sample_ids)
    await impatient.sender.offer(sent)
    again = await join()
    assert [one.sample_id for one in await again.pull_all(1)] == [sent[0].sample_id]


async def test_what_a_rank_had_that_was_killed_goes_to_a_rank_that_lives(
    server: RedisServer, impatient: FedRun, join: Join
) -> None:
    """As processes: both wait for samples, one is killed with what it was given."""
    sent = feed_samples(2)
    with program(PULLING, server) as dying:
        await impatient.hears(ConsumerJoined)
        await impatient.sender.offer(sent[:1])
        assert dying.stdout is not None
        assert await asyncio.to_thread(dying.stdout.readline) == b"1\n"
        living = await join("living")
        pulling = asyncio.create_task(living.pull_all(1))
    lost = await impatient.hears(ConsumerLost)
    await impatient.sender.release(lost.sample_ids)
    await impatient.sender.offer([one for one in sent if one.sample_id in lost.sample_ids])
    assert [one.sample_id for one in await pulling] == [sent[0].sample_id]


TROUBLES_OF_ALL = {**TROUBLES, "restarted": lambda server: away(server, 0.0), **LONG}


@pytest.mark.parametrize(
    "trouble", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in TROUBLES_OF_ALL]
)
@pytest.mark.parametrize("server", [False, True], indirect=True, ids=["forgets", "keeps data"])
async def test_a_redis_in_trouble_loses_nothing_and_gives_nothing_twice(
    server: ReplicatedServer, run: FedRun, join: Join, trouble: str
) -> None:
    """A rank in the middle of a step, with samples on their way to it."""
    receiver, sent = await join(), feed_samples(12)
    await run.sender.offer(sent[:4])
    received = await receiver.pull_all(2)
    pulling = asyncio.create_task(receiver.pull_all(8))
    await TROUBLES_OF_ALL[trouble](server)
    await run.sender.offer(sent[4:])
    received += await pulling
    await receiver.report(step_done(received))
    received += await receiver.pull_all(2)
    done = await run.hears(StepDone)
    assert list(done.sample_ids) == [one.sample_id for one in sent[:10]]
    assert [one.sample_id for one in received] == [one.sample_id for one in sent]
    assert not [report for report in run.told if isinstance(report, ConsumerLost)]


async def test_a_redis_that_stays_away_ends_both_sides_with_its_name(server: RedisServer) -> None:
    run = FedRun(server, outage_s=0.5)
    rank = await asyncio.to_thread(RedisSampleReceiver, server.url, "run", "trainer", outage_s=0.5)
    await asyncio.to_thread(server.kill)
    with pytest.raises(TransportError, match=r"Redis at .* was away for 0\.5 s"):
        await run.fails()
    with pytest.raises(TransportError, match=r"Redis at .* was away for 0\.5 s"):
        await asyncio.to_thread(rank.pull, 1)
    await asyncio.to_thread(rank.leave)
    await run.close()


async def test_a_failover_that_loses_the_last_second_loses_no_sample_and_no_report(
    server: ReplicatedServer, run: FedRun, join: Join
) -> None:
    """Samples were read, and a step was heard of, by a primary of which the replica knows nothing of that."""
    receiver, sent = await join(), feed_samples(12)
    await run.sender.offer(sent[:4])
    received = await receiver.pull_all(4)
    await asyncio.to_thread(server.replicate)
    server.lag()
    await run.sender.offer(sent[4:10])
    received += await receiver.pull_all(4)
    await receiver.report(step_done(received))
    await run.hears(StepDone)
    await asyncio.to_thread(server.fail_over)
    await run.sender.offer(sent[10:])
    received += await receiver.pull_all(4)
    dropped = tuple(one.sample_id for one in received[8:])
    await asyncio.to_thread(receiver.end.report, SamplesDropped(consumer="trainer", sample_ids=dropped, reason="so"))
    await run.hears(SamplesDropped)
    assert [one.sample_id for one in received] == [one.sample_id for one in sent]
    told = [type(report) for report in run.told]
    assert (told.count(StepDone), told.count(SamplesDropped), told.count(ConsumerLost)) == (1, 1, 0)


def entry(number: int, kind: str, data: bytes, *, epoch: str = "epoch") -> tuple[str | bytes, ...]:
    """The command that adds a message as the orchestrator would."""
    return ("*", "header", Message(number, kind, data).header("run", epoch), "data", data)


class Forger:
    """Writes into the stream to the only rank, or from it, what nobody writes there."""

    def __init__(self, server: RedisServer, pattern: str = KEYS.down("*")) -> None:
        self._server = server
        (self._stream,) = ask(server, "KEYS", pattern)  # type: ignore[misc, union-attr]

    def add(self, *fields: str | bytes) -> None:
        with contextlib.closing(RedisConnection(self._server.url)) as connection:
            connection.one("XADD", self._stream, *fields)  # type: ignore[arg-type]


async def test_an_entry_of_another_epoch_is_ignored_and_counted(server: RedisServer, run: FedRun, join: Join) -> None:
    receiver, (sample,) = await join(), feed_samples(1)
    Forger(server).add(
        *entry(2, sample_messages.SAMPLES, encode_samples([sample], run="run", epoch="old"), epoch="old")
    )
    sent = feed_samples(1, first=50)
    await run.sender.offer(sent)
    assert [one.sample_id for one in await receiver.pull_all(1)] == [sent[0].sample_id]
    assert receiver.end.num_ignored == 1
    await run.sender.offer(feed_samples(1, first=60))
    await receiver.pull_all(1)  # which tells of it
    assert run.place.figures.ignored == 1


async def test_reports_and_joins_of_another_epoch_are_ignored_and_counted(
    server: RedisServer, run: FedRun, join: Join
) -> None:
    receiver = await join()
    Forger(server, KEYS.up("*")).add(*entry(2, sample_messages.REPORT, encoded(step_done([])), epoch="old"))
    Forger(server, KEYS.joins).add(*entry(1, "join", b"nothing that is known", epoch="old"))
    await receiver.report(step_done([]))
    await run.hears(StepDone)
    await join("late")  # read after the other one
    assert run.place.figures.ignored == 2
    assert len([report for report in run.told if isinstance(report, StepDone)]) == 1


async def test_an_outage_is_told_by_the_connection_s_own_state_and_counted(server: RedisServer, run: FedRun) -> None:
    """Whoever admits holds on at once, whatever credits are left."""
    told: list[bool] = []
    changed = asyncio.Event()

    def tell(is_away: bool) -> None:
        told.append(is_away)
        changed.set()

    run.place.tell(tell)
    await asyncio.to_thread(server.kill)
    await asyncio.wait_for(changed.wait(), PATIENCE_S)
    assert told == [True]
    assert run.place.is_away
    changed.clear()
    await asyncio.to_thread(server.start)
    await asyncio.wait_for(changed.wait(), PATIENCE_S)
    assert told == [True, False]
    assert (run.place.figures.outages, run.place.figures.away_s > 0) == (1, True)


def documents() -> dict[str, tuple[bytes, str, type[CorruptData]]]:
    """What a rank may find in its stream, and how it is told."""
    (sample,) = feed_samples(1)
    whole = encode_samples([sample], run="run", epoch="epoch")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    schema, newer = f'"schema":"{SCHEMA}"'.encode(), f'"schema":"{SCHEMA + 1}"'.encode()
    return {
        "cut short": (whole[:-50], "document 2 for 'trainer'", CorruptData),
        "flipped": (bytes(flipped), "document 2 for 'trainer'", CorruptData),
        "no document": (b"sample", "document 2 for 'trainer'", CorruptData),
        "a newer schema": (
            resealed(whole.replace(schema, newer)),
            f"schema {SCHEMA + 1}, .* reads schema {SCHEMA}",
            OtherSchema,
        ),
        "of another epoch": (encode_samples([sample], run="run", epoch="old"), "epoch old", CorruptData),
    }


def resealed(content: bytes) -> bytes:
    """With the checksum of its header."""
    import xxhash

    length = 8 + int.from_bytes(content[:8], "little")
    return content[:-24] + xxhash.xxh3_64_intdigest(content[:length]).to_bytes(8, "little") + content[-16:]


@pytest.mark.parametrize("case", documents())
async def test_a_sample_that_cannot_be_read_is_named(server: RedisServer, run: FedRun, join: Join, case: str) -> None:
    receiver, (document, named, error) = await join(), documents()[case]
    Forger(server).add(*entry(2, sample_messages.SAMPLES, document))
    with pytest.raises(error, match=named):
        await receiver.pull(1)


async def test_an_entry_that_is_not_what_its_header_says_is_named(server: RedisServer, run: FedRun, join: Join) -> None:
    receiver, (sample,) = await join(), feed_samples(1)
    document = encode_samples([sample], run="run", epoch="epoch")
    fields = entry(2, sample_messages.SAMPLES, document)
    Forger(server).add(*fields[:-1], document[:-1])
    with pytest.raises(CorruptData, match="message 2 of the stream"):
        await receiver.pull(1)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
async def test_a_run_of_another_schema_is_told_apart_before_anything_is_taken(server: RedisServer, schema: int) -> None:
    ask(server, "SET", KEYS.open, msgspec.json.encode(OpenFeed(schema, "epoch", LEASE_S)).decode())
    with pytest.raises(OtherSchema, match=f"schema {schema}, and this Tailrace reads schema {SCHEMA}"):
        await Receiver.join(server.url, "trainer")
    assert ask(server, "DBSIZE") == 1


async def test_a_run_that_is_started_again_is_told_apart(server: RedisServer, join: Join) -> None:
    with program(SERVING, server):
        receiver = await join()
    again = FedRun(server, epoch="another")
    try:
        with pytest.raises(PeerGone, match=r"started again \(epoch another\)"):
            await receiver.pull(1)
    finally:
        await again.close()


async def test_a_rank_is_said_to_be_heard_before_it_is_welcomed(server: RedisServer, run: FedRun, join: Join) -> None:
    """Else it would take itself for given up where the run is killed before it counts leases again."""
    with redis.Redis.from_url(server.url) as client, client.monitor() as monitor:
        await join()
        keys = itertools.takewhile(lambda key: key != "end", map(_key, iter(monitor.next_command, None)))
        ask(server, "EXISTS", "end")
        written = list(keys)
    (heard,) = {key for key in written if key.endswith(":heard")}
    assert written.index(heard) < written.index(heard.replace(":heard", ":down"))


def _key(seen: dict[str, str]) -> str:
    """The key of a command that Redis was seen to run, if it has one."""
    return [*seen["command"].split(), ""][1]


async def test_a_run_that_was_killed_is_noticed(server: RedisServer, join: Join) -> None:
    with program(SERVING, server):
        receiver = await join()
    with pytest.raises(PeerGone, match="fell silent"):
        await receiver.pull(1)


REPORTS = {
    "no message": (sample_messages.REPORT, b"\xc1", "a message of the rank 'trainer'"),
    "of a carrier": (sample_messages.REPORT, encoded(SamplesTaken(consumer="trainer", sample_ids=())), "'trainer'"),
    "of another": (sample_messages.REPORT, encoded(step_done([], "other")), "'trainer' reports as 'other'"),
    "no pull": (sample_messages.PULL, b"", "a message of the rank 'trainer'"),
    "of no kind": ("gift", b"", "unknown kind 'gift'"),
}


@pytest.mark.parametrize("case", REPORTS)
async def test_a_report_that_is_none_ends_the_run_and_names_the_rank(
    server: RedisServer, run: FedRun, join: Join, case: str
) -> None:
    kind, data, named = REPORTS[case]
    await join()
    Forger(server, KEYS.up("*")).add(*entry(2, kind, data))
    with pytest.raises(CorruptData, match=named):
        await run.fails()
    with pytest.raises(CorruptData, match=named):
        await run.sender.offer(feed_samples(1))
    await run.close()


async def test_wrong_passwords_and_wrong_tls_are_named(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    password = server.url.split(":")[2].split("@")[0]
    for url, named in (
        (server.url.replace(password, "wrong"), "refuses this user or password"),
        (server.url.replace(password, "").replace(":@", ""), "refuses this user or password"),
        (server.url.replace(f":{password}", f"nobody:{password}"), "refuses this user or password"),
    ):
        with pytest.raises(SettingsError, match=named):
            await Receiver.join(url, "trainer", patience_s=1.0)
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    with pytest.raises(SettingsError, match=r"no Redis answers at .* by rediss://"):
        await Receiver.join(server.url.replace("redis://", "rediss://"), "trainer", patience_s=1.0)


async def test_a_run_that_is_not_there_is_named(server: RedisServer) -> None:
    with pytest.raises(PeerGone, match="no run called 'run' feeds a trainer"):
        await Receiver.join(server.url, "trainer", patience_s=0.3)


async def test_a_rank_that_was_given_up_and_comes_to_is_told(server: RedisServer, impatient: FedRun) -> None:
    with program(PULLING, server) as asleep:
        assert asleep.stdout is not None
        await impatient.sender.offer(feed_samples(1))
        assert await asyncio.to_thread(asleep.stdout.readline) == b"1\n"
        asleep.send_signal(signal.SIGSTOP)
        await impatient.hears(ConsumerLost)
        asleep.send_signal(signal.SIGCONT)
        printed = await asyncio.to_thread(asleep.stdout.readline)
    assert b"ConsumerRefused" in printed
