"""Promises of every batch queue, whatever carries it, to one rank or to several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import PeerGone, TransportError
from tailrace.records import PlannedBatch
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.queue import BatchReceiver, BatchSender, MemoryBatchQueue
from tailrace.transport.batches.stores import (
    BatchSource,
    BatchStore,
    FileSource,
    FileStore,
    SharedMemoryStore,
    ValueSource,
    ValueStore,
)
from tailrace.transport.channels import Channel, OpenChannel, ipc_address
from tailrace.transport.redis.channels import RedisPlace
from tests.support.redis_servers import needs_redis, place_of
from tests.transport.transport_builders import assert_same_batch, make_batch, plan


@dataclass
class Queue:
    """All ends of one."""

    sender: BatchSender
    receivers: list[BatchReceiver]

    def batch(self, step: int = 1, **shape: int) -> PlannedBatch:
        return make_batch(step, num_ranks=len(self.receivers), **shape)  # type: ignore[arg-type]

    async def send(self, batch: PlannedBatch) -> None:
        await self.sender.send(batch)

    async def receive(self) -> None:
        """Every rank, in the other direction than they were made in."""
        for receiver in reversed(self.receivers):
            await receiver.receive()

    async def acknowledge(self, step: int) -> None:
        for receiver in self.receivers:
            await receiver.acknowledge(step)

    async def close(self) -> None:
        for receiver in self.receivers:
            await receiver.close()
        await self.sender.close()


def open_queue(
    kind: str, num_ranks: int, address: str, folder: Path, redis: RedisPlace | None, *, ranks_per_row: int = 1
) -> Queue:
    """Two batches at most."""
    if kind == "memory":
        queue = MemoryBatchQueue(2, num_ranks=num_ranks)
        return Queue(queue, [queue.receiver(rank) for rank in range(num_ranks)])
    match kind:
        case "shared memory":
            store: BatchStore = SharedMemoryStore(folder)
            sources: list[BatchSource] = [FileSource(folder, recycled=True) for _ in range(num_ranks)]
        case "by value" | "redis":
            store, sources = ValueStore(), [ValueSource() for _ in range(num_ranks)]
        case _:
            store, sources = FileStore(folder), [FileSource(folder) for _ in range(num_ranks)]
    opened: OpenChannel = Channel
    keeping: OpenChannel = Channel
    if redis is not None:
        address, opened = redis.address("batches"), redis.open_channel
        keeping = redis.open_keeping_channel if kind == "redis" else opened
    ranks = {"num_ranks": num_ranks, "ranks_per_row": ranks_per_row}
    return Queue(
        ChannelBatchSender(address, store, **ranks, open_channel=keeping),
        [
            ChannelBatchReceiver(address, source, rank=rank, **ranks, open_channel=opened)
            for rank, source in enumerate(sources)
        ],
    )


KINDS = (
    "memory",
    "shared memory",
    "files",
    "by value",
    pytest.param("redis", marks=needs_redis),
    pytest.param("redis, files", marks=needs_redis),
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def redis(kind: str, request: pytest.FixtureRequest) -> RedisPlace | None:
    return place_of(request.getfixturevalue("shared_redis")) if "redis" in kind else None


@pytest.fixture(params=[1, 3])
async def queue(
    request: pytest.FixtureRequest, kind: str, redis: RedisPlace | None, sockets: Path, tmp_path: Path
) -> AsyncIterator[Queue]:
    queue = open_queue(kind, request.param, ipc_address(sockets, "batches"), tmp_path / "batches", redis)
    (tmp_path / "batches").mkdir(exist_ok=True)
    yield queue
    await queue.close()
    assert not list(tmp_path.glob("batches/*"))


async def assert_waits(coroutine: object) -> asyncio.Task[None]:
    task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
    await asyncio.wait({task}, timeout=0.05)
    assert not task.done()
    return task


async def test_every_rank_receives_its_own_rows_whole_and_in_order(queue: Queue) -> None:
    sent = [plan([40, 7, 30, 1, 22, 9, 9], step=step, num_ranks=len(queue.receivers), row_tokens=50) for step in (1, 2)]
    for batch in sent:
        await queue.send(batch)
    for batch in sent:
        parts = [await receiver.receive() for receiver in queue.receivers]
        for rank, part in enumerate(parts):
            assert_same_batch(part, batch, rank)
        assert sum(len(part.token_ids) for part in parts) == batch.summary.num_tokens
        assert len({part.num_rows for part in parts}) == 1


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
async def test_neighbours_that_share_rows_open_the_same_ones(
    kind: str, redis: RedisPlace | None, sockets: Path, tmp_path: Path
) -> None:
    address = ipc_address(sockets, "batches")
    queue = open_queue(kind, 4, address, tmp_path / "batches", redis, ranks_per_row=2)
    (tmp_path / "batches").mkdir(exist_ok=True)
    batches = [make_batch(step, num_samples=6, num_ranks=2) for step in (1, 2, 3)]
    for batch in batches[:2]:
        await queue.send(batch)
    assert len(list(tmp_path.rglob("*.safetensors"))) in {0, 4}  # written once for each pair
    third = await assert_waits(queue.send(batches[2]))
    for rank, receiver in enumerate(queue.receivers):
        assert_same_batch(await receiver.receive(), batches[0], rank // 2)
        assert not third.done()
        await receiver.acknowledge(1)
    await third
    await queue.close()


async def test_tokens_too_old_bear_no_loss_and_are_context_to_the_receiver(queue: Queue) -> None:
    await queue.send(plan([30] * 6, num_ranks=len(queue.receivers), oldest_version=5))
    for receiver in queue.receivers:
        part = await receiver.receive()
        assert part.loss_mask.any()
        np.testing.assert_array_equal(part.loss_mask, part.policy_versions >= 5)


async def test_a_batch_may_be_empty_or_grow_from_step_to_step(queue: Queue) -> None:
    for step, num_samples in enumerate([0, 1, 200, 3, 1500], start=1):
        sent = queue.batch(step, num_samples=num_samples, tokens_per_sample=min(40, num_samples))
        await queue.send(sent)
        for rank, receiver in enumerate(queue.receivers):
            assert_same_batch(await receiver.receive(), sent, rank)
            await receiver.acknowledge(step)


async def test_send_waits_for_every_ranks_acknowledgement_when_the_queue_is_full(queue: Queue) -> None:
    await queue.send(queue.batch(1))
    await queue.send(queue.batch(2))
    third = await assert_waits(queue.send(queue.batch(3)))
    await queue.receive()
    for receiver in queue.receivers:
        await asyncio.wait({third}, timeout=0.05)
        assert not third.done()  # received is not yet acknowledged, nor is what one of the ranks acknowledged
        await receiver.acknowledge(1)
    await third


async def test_a_received_batch_stays_as_it_is_until_it_is_acknowledged(queue: Queue) -> None:
    await queue.send(queue.batch(1))
    parts = [await receiver.receive() for receiver in queue.receivers]
    for step in range(2, 6):
        await queue.send(queue.batch(step))
        await queue.receive()
        await queue.acknowledge(step)
    for rank, part in enumerate(parts):
        assert_same_batch(part, queue.batch(1), rank)


async def test_a_cancelled_receive_loses_nothing(queue: Queue) -> None:
    receiver = queue.receivers[-1]
    waiting = await assert_waits(receiver.receive())
    sending = asyncio.ensure_future(queue.send(queue.batch(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await sending
    received = waiting if not waiting.cancelled() and waiting.done() else asyncio.ensure_future(receiver.receive())
    assert (await received).summary.step == 1  # type: ignore[attr-defined]


async def test_a_cancelled_send_goes_out_whole_or_not_at_all(queue: Queue) -> None:
    sending = asyncio.ensure_future(queue.send(queue.batch(1)))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait({sending})
    await queue.send(queue.batch(2))
    steps = [(await receiver.receive()).summary.step for receiver in queue.receivers]
    assert steps in ([1] * len(steps), [2] * len(steps))


async def test_a_batch_is_acknowledged_once_and_only_after_it_was_received(queue: Queue) -> None:
    await queue.send(queue.batch(1))
    for receiver in queue.receivers:
        with pytest.raises(TransportError, match="step 1 "):
            await receiver.acknowledge(1)
        await receiver.receive()
        await receiver.acknowledge(1)
        with pytest.raises(TransportError, match="step 1 "):
            await receiver.acknowledge(1)


async def test_a_batch_that_was_planned_for_other_ranks_is_refused(queue: Queue) -> None:
    with pytest.raises(ValueError, match="for 2 ranks"):
        await queue.send(make_batch(1, num_ranks=2))


async def test_closing_wakes_whoever_waits(queue: Queue) -> None:
    receiving = await assert_waits(queue.receivers[0].receive())
    await queue.close()
    await queue.close()
    with pytest.raises(PeerGone):
        await receiving
    with pytest.raises(PeerGone):
        await queue.send(queue.batch(1))


async def test_one_receivers_end_is_the_end_of_the_queue(queue: Queue) -> None:
    await queue.send(queue.batch(1))
    await queue.send(queue.batch(2))
    sending = await assert_waits(queue.send(queue.batch(3)))
    await queue.receivers[-1].close()
    with pytest.raises(PeerGone):
        await sending


async def test_closing_wakes_a_send_that_waits_for_room(queue: Queue) -> None:
    await queue.send(queue.batch(1))
    await queue.send(queue.batch(2))
    sending = await assert_waits(queue.send(queue.batch(3)))
    await queue.close()
    with pytest.raises(PeerGone):
        await sending


def test_a_queue_holds_one_batch_at_least() -> None:
    with pytest.raises(ValueError, match="capacity"):
        MemoryBatchQueue(capacity=0)
