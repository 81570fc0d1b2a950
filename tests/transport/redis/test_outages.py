"""A queue of batches while Redis is away, forgets or is full: each rank trains each batch once, and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.errors import TransportError
from tailrace.records import PlannedBatch, RunStatus, StepTrained, TrainerEnded
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.stores import ValueSource, ValueStore
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.events.rpc import ConversingEventLogServer, EventLogClient
from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import ReplicatedServer, ask, needs_redis, place_of, redis_server
from tests.transport.transport_builders import assert_same_batch, plan

pytestmark = needs_redis

RANKS = 2
STEPS = 12
TROUBLE_AT = 5
PATIENCE_S = 120.0


class Queue:
    """Both ends of one."""

    def __init__(self, server: RedisServer, outage_s: float = 60.0, url: str = "") -> None:
        redis = place_of(server, outage_s=outage_s, url=url)
        address = redis.address("batches")
        self.sender: ChannelBatchSender = ChannelBatchSender(
            address, ValueStore(), num_ranks=RANKS, retained_bytes=10**9, open_channel=redis.open_keeping_channel
        )
        self.ranks: list[ChannelBatchReceiver] = [
            ChannelBatchReceiver(address, ValueSource(), rank=rank, num_ranks=RANKS, open_channel=redis.open_channel)
            for rank in range(RANKS)
        ]
        self.has_trained = asyncio.Event()
        """Set by each step."""
        self.trained: list[list[int]] = [[] for _ in range(RANKS)]

    async def send_all(self) -> None:
        for step in range(1, STEPS + 1):
            await self.sender.send(batch(step))

    async def train(self, rank: int) -> None:
        """All batches; a checkpoint after every fourth."""
        while len(self.trained[rank]) < STEPS:
            received = await self.ranks[rank].receive()
            step = received.summary.step
            assert_same_batch(received, batch(step), rank)
            self.trained[rank].append(step)
            await self.ranks[rank].acknowledge(step)
            if rank == 0 and step % 4 == 0:
                self.sender.saved(step)
            self.has_trained.set()

    async def train_until(self, step: int) -> None:
        while not all(step in steps for steps in self.trained):
            self.has_trained.clear()
            await self.has_trained.wait()


def batch(step: int) -> PlannedBatch:
    return plan([3000, 200, 100_000], step=step, num_ranks=RANKS, row_tokens=100_000)


@asynccontextmanager
async def queue(server: RedisServer, outage_s: float = 60.0, url: str = "") -> AsyncIterator[Queue]:
    made = Queue(server, outage_s, url)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield made
    finally:
        await asyncio.gather(*(rank.close() for rank in made.ranks), made.sender.close())


async def away(server: RedisServer, for_s: float) -> None:
    """Gone, and back after so long, with what it keeps."""
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(for_s)
    await asyncio.to_thread(server.start)


async def flush(server: RedisServer) -> None:
    await asyncio.to_thread(ask, server, "FLUSHALL")


async def full(server: RedisServer) -> None:
    """No memory, for a moment."""
    await asyncio.to_thread(ask, server, "CONFIG", "SET", "maxmemory", "1")
    await asyncio.sleep(0.3)
    await asyncio.to_thread(ask, server, "CONFIG", "SET", "maxmemory", "0")


async def fail_over(server: ReplicatedServer) -> None:
    """To a replica that lacks the last second."""
    await asyncio.to_thread(server.replicate)
    server.lag()
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.fail_over)


async def readonly(server: RedisServer) -> None:
    """A replica, that is promoted after a moment."""
    await asyncio.to_thread(ask, server, "REPLICAOF", "127.0.0.1", "1")
    await asyncio.sleep(0.3)
    await asyncio.to_thread(ask, server, "REPLICAOF", "NO", "ONE")


TROUBLES: dict[str, Callable[[ReplicatedServer], Awaitable[None]]] = {
    "away for 0.5 s": lambda server: away(server, 0.5),
    "flushed": flush,
    "full": full,
    "failed over": fail_over,
    "read only": readonly,
}
LONG: dict[str, Callable[[ReplicatedServer], Awaitable[None]]] = {
    "away for 5 s": lambda server: away(server, 5.0),
    "away for 20 s": lambda server: away(server, 20.0),
}


@pytest.mark.parametrize("trouble", [*TROUBLES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
@pytest.mark.parametrize("keeps_data", [False, True])
async def test_each_rank_trains_each_batch_once_and_in_order(trouble: str, keeps_data: bool, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", keeps_data=keeps_data) as server:
        async with queue(server) as run:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.send_all())
                for rank in range(RANKS):
                    tasks.create_task(run.train(rank))
                await run.train_until(TROUBLE_AT)
                await {**TROUBLES, **LONG}[trouble](server)
            assert run.trained == [list(range(1, STEPS + 1))] * RANKS


@pytest.mark.long
async def test_one_trouble_after_another_changes_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        async with queue(server) as run, asyncio.TaskGroup() as tasks:
            tasks.create_task(run.send_all())
            for rank in range(RANKS):
                tasks.create_task(run.train(rank))
            for step, trouble in enumerate(TROUBLES.values(), start=2):
                await run.train_until(step)
                await trouble(server)
        assert run.trained == [list(range(1, STEPS + 1))] * RANKS


async def test_what_lies_in_redis_goes_when_a_checkpoint_has_it(server: RedisServer) -> None:
    async with queue(server) as run:
        tasks = [asyncio.create_task(run.send_all()), *(asyncio.create_task(run.train(rank)) for rank in range(RANKS))]
        await asyncio.gather(*tasks)
        run.sender.saved(STEPS)
        keys = b"?"
        while isinstance(keys, bytes) or any(b"batches" in key and b"." in key.rpartition(b":")[2] for key in keys):
            keys = await asyncio.to_thread(ask, server, "KEYS", "*:batches-*:to:*")  # type: ignore[assignment]
            assert isinstance(keys, list)
            await asyncio.sleep(0.02)


async def test_a_redis_that_stays_away_ends_the_queue_with_its_name(server: RedisServer) -> None:
    async with queue(server, outage_s=0.3) as run:
        await run.sender.send(batch(1))
        await run.ranks[0].receive()
        await asyncio.to_thread(server.kill)
        with pytest.raises(TransportError, match=r"Redis at .* was away for 0\.3 s"):
            await run.ranks[0].receive()
        with pytest.raises(TransportError, match=r"Redis at .* was away for 0\.3 s"):
            await run.send_all()


async def test_events_come_once_and_in_order_though_redis_forgets_them(server: RedisServer) -> None:
    redis, log = place_of(server), MemoryEventLog("this-epoch")
    addresses = [redis.address(f"events-{rank}") for rank in range(2)]
    log_server = ConversingEventLogServer(log, addresses, redis.open_channel)
    clients = [EventLogClient(address, "this-epoch", redis.open_channel) for address in addresses]
    end = TrainerEnded(epoch="this-epoch", status=RunStatus.FINISHED, step=80, reason="done")

    async def follow(client: EventLogClient) -> list[object]:
        return [event async for event in client.follow()]

    async with asyncio.timeout(PATIENCE_S):
        following = [asyncio.create_task(follow(client)) for client in clients]
        for step in range(1, 81):
            await clients[0].append(StepTrained(epoch="this-epoch", step=step, version=step, metrics={}))
            if step == 20:
                await flush(server)
            if step == 50:
                await away(server, 0.0)
        await clients[1].append(end)
        await log.close()
        await log_server.close()
        told = [await one for one in following]
    assert told[0] == told[1]
    assert [getattr(event, "step", None) for event in told[0]] == [*range(1, 81), 80]
    for client in clients:
        await client.close()
