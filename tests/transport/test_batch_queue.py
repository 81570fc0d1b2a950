"""Promises of every batch queue, whatever carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transport_builders import assert_same_batch, make_batch

from tailrace.errors import PeerGone, TransportError
from tailrace.transport.batch_queue import BatchQueue, MemoryBatchQueue
from tailrace.transport.channels import ipc_address
from tailrace.transport.shared_memory import SharedMemoryBatchQueue


@pytest.fixture(params=["memory", "shared memory"])
async def queue(request: pytest.FixtureRequest, sockets: Path, tmp_path: Path) -> AsyncIterator[BatchQueue]:
    queue: BatchQueue = (
        MemoryBatchQueue(capacity=2)
        if request.param == "memory"
        else SharedMemoryBatchQueue(ipc_address(sockets, "batches"), tmp_path, capacity=2)
    )
    yield queue
    await queue.close()
    assert not list(tmp_path.iterdir())


async def assert_waits(coroutine: object) -> asyncio.Task[None]:
    task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
    await asyncio.wait({task}, timeout=0.05)
    assert not task.done()
    return task


async def test_batches_arrive_whole_and_in_order(queue: BatchQueue) -> None:
    for step in (1, 2):
        await queue.send(make_batch(step))
    for step in (1, 2):
        assert_same_batch(await queue.receive(), make_batch(step))


async def test_a_batch_may_be_empty_or_grow_from_step_to_step(queue: BatchQueue) -> None:
    for step, num_samples in enumerate([0, 1, 200, 3, 5000], start=1):
        sent = make_batch(step, num_samples=num_samples, tokens_per_sample=num_samples, state=b"s" * num_samples)
        if num_samples > 1000:
            sent = make_batch(step, num_samples=num_samples, tokens_per_sample=40)
        await queue.send(sent)
        assert_same_batch(await queue.receive(), sent)
        await queue.acknowledge(step)


async def test_send_waits_for_an_acknowledgement_when_the_queue_is_full(queue: BatchQueue) -> None:
    await queue.send(make_batch(1))
    await queue.send(make_batch(2))
    third = await assert_waits(queue.send(make_batch(3)))
    await queue.receive()
    await asyncio.wait({third}, timeout=0.05)
    assert not third.done()  # received is not yet acknowledged
    await queue.acknowledge(1)
    await third


async def test_a_received_batch_stays_as_it_is_until_it_is_acknowledged(queue: BatchQueue) -> None:
    await queue.send(make_batch(1))
    first = await queue.receive()
    for step in range(2, 6):
        await queue.send(make_batch(step))
        await queue.receive()
        await queue.acknowledge(step)
    assert_same_batch(first, make_batch(1))


async def test_a_cancelled_receive_loses_nothing(queue: BatchQueue) -> None:
    waiting = await assert_waits(queue.receive())
    sending = asyncio.ensure_future(queue.send(make_batch(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await sending
    received = waiting if not waiting.cancelled() and waiting.done() else asyncio.ensure_future(queue.receive())
    assert (await received).summary.step == 1  # type: ignore[attr-defined]


async def test_a_batch_is_acknowledged_once_and_only_after_it_was_received(queue: BatchQueue) -> None:
    await queue.send(make_batch(1))
    with pytest.raises(TransportError, match="step 1 "):
        await queue.acknowledge(1)
    await queue.receive()
    await queue.acknowledge(1)
    with pytest.raises(TransportError, match="step 1 "):
        await queue.acknowledge(1)


async def test_closing_wakes_whoever_waits(queue: BatchQueue) -> None:
    receiving = await assert_waits(queue.receive())
    await queue.close()
    await queue.close()
    with pytest.raises(PeerGone):
        await receiving
    with pytest.raises(PeerGone):
        await queue.send(make_batch(1))


async def test_closing_wakes_a_send_that_waits_for_room(queue: BatchQueue) -> None:
    await queue.send(make_batch(1))
    await queue.send(make_batch(2))
    sending = await assert_waits(queue.send(make_batch(3)))
    await queue.close()
    with pytest.raises(PeerGone):
        await sending


def test_a_queue_holds_one_batch_at_least() -> None:
    with pytest.raises(ValueError, match="capacity"):
        MemoryBatchQueue(capacity=0)
