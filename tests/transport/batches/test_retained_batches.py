"""A sender that outlives its receivers: what no checkpoint has is sent again to those that come in their place."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.errors import PeerGone, TransportError
from tailrace.records import PlannedBatch
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.stores import (
    BatchSource,
    BatchStore,
    FileSource,
    FileStore,
    Piece,
    SharedMemoryStore,
    ValueSource,
    ValueStore,
)
from tailrace.transport.channels import Channel, OpenChannel, ipc_address
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.store import MemoryPayloadStore
from tailrace.transport.redis.channels import RedisPlace
from tests.support.redis_servers import needs_redis, place_of
from tests.transport.transport_builders import assert_same_batch, plan

PLENTY = 10**9


def batch(step: int) -> PlannedBatch:
    return plan([30, 20, 10], step=step, num_ranks=2, row_tokens=40)


class Ends:
    """A sender, and two ranks that may be replaced."""

    def __init__(
        self, kind: str, sockets: Path, folder: Path, retained_bytes: int | None, redis: RedisPlace | None = None
    ) -> None:
        self._kind, self._sockets, self._folder, self._lives, self._redis = kind, sockets, folder, 0, redis
        self.sender = self._sender(retained_bytes)
        self.ranks: list[ChannelBatchReceiver] = []
        self.meet()

    def _sender(self, retained_bytes: int | None) -> ChannelBatchSender:
        match self._kind:
            case "shared memory":
                store: BatchStore = SharedMemoryStore(self._folder)
            case "files":
                store = FileStore(self._folder)
            case _:
                store = ValueStore()
        opened: OpenChannel = Channel if self._redis is None else self._redis.open_keeping_channel
        return ChannelBatchSender(
            self._address, store, num_ranks=2, capacity=3, retained_bytes=retained_bytes, open_channel=opened
        )

    @property
    def _address(self) -> str:
        name = f"batches.{self._lives}"
        return ipc_address(self._sockets, name) if self._redis is None else self._redis.address(name)

    def meet(self) -> None:
        """Two ranks come."""
        opened: OpenChannel = Channel if self._redis is None else self._redis.open_channel
        self.ranks = [
            ChannelBatchReceiver(self._address, self._source(), rank=rank, num_ranks=2, open_channel=opened)
            for rank in range(2)
        ]

    def _source(self) -> BatchSource:
        match self._kind:
            case "shared memory":
                return FileSource(self._folder, recycled=True)
            case "files":
                return FileSource(self._folder)
            case _:
                return ValueSource()

    async def replace(self) -> None:
        """The ranks end, and others come."""
        for rank in self.ranks:
            await rank.close()
        self._lives += 1
        await self.sender.reconnect(self._address)
        self.meet()

    async def train(self, *steps: int) -> list[int | None]:
        """Every rank receives the batches of these steps, and gives them back; versions that they are told of."""
        versions = []
        for step in steps:
            told = set()
            for number, rank in enumerate(self.ranks):
                received = await rank.receive()
                assert_same_batch(received, batch(step), number)
                told.add(received.version_after)
                await rank.acknowledge(step)
            versions += told
        return versions


@asynccontextmanager
async def ends(
    kind: str, sockets: Path, folder: Path, retained_bytes: int | None = PLENTY, redis: RedisPlace | None = None
) -> AsyncIterator[Ends]:
    made = Ends(kind, sockets, folder, retained_bytes, redis)
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        for rank in made.ranks:
            await rank.close()
        await made.sender.close()


@pytest.mark.parametrize("kind", ["shared memory", "files", "by value", pytest.param("redis", marks=needs_redis)])
async def test_what_no_checkpoint_has_is_sent_again_in_order_before_what_is_new(
    kind: str, sockets: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    redis = place_of(request.getfixturevalue("shared_redis")) if kind == "redis" else None
    async with ends(kind, sockets, tmp_path, redis=redis) as run:
        for step in range(1, 6):
            await run.sender.send(batch(step))
            await run.train(step)
        run.sender.saved(2)
        await run.sender.send(batch(6))
        await run.ranks[0].receive()  # of one rank alone, and never given back
        await run.replace()
        sending = asyncio.create_task(run.sender.send(batch(7)))
        assert run.sender.resume_after(3) == 3  # a checkpoint that nobody had told of
        await run.train(4, 5, 6, 7)
        await sending
        with pytest.raises(TransportError, match="the batches of steps 1 to 2 are not kept any more"):
            run.sender.resume_after(0)


@pytest.mark.parametrize("kind", ["shared memory", "files", "by value"])
async def test_what_is_sent_again_says_with_which_version_its_step_ended(
    kind: str, sockets: Path, tmp_path: Path
) -> None:
    async with ends(kind, sockets, tmp_path) as run:
        for step, version in ((1, 1), (2, 1), (3, 2)):
            await run.sender.send(batch(step))
            assert await run.train(step) == [None]
            run.sender.step_ended(step, version)
        await run.sender.send(batch(4))
        run.sender.saved(1)
        await run.replace()
        run.sender.resume_after(1)
        assert await run.train(2, 3, 4) == [1, 2, None]


async def test_a_batch_that_is_written_while_nobody_is_there_comes_last(sockets: Path, tmp_path: Path) -> None:
    async with ends("shared memory", sockets, tmp_path) as run:
        await run.sender.send(batch(1))
        await run.train(1)
        for rank in run.ranks:
            await rank.close()
        sending = asyncio.create_task(run.sender.send(batch(2)))  # before or after their end is noticed
        await run.replace()
        run.sender.resume_after(0)
        await run.train(1, 2)
        await sending


@pytest.mark.parametrize("kind", ["shared memory", "files", "by value"])
async def test_batches_that_wait_for_a_checkpoint_keep_no_file_open(kind: str, sockets: Path, tmp_path: Path) -> None:
    async with ends(kind, sockets, tmp_path) as run:
        before = len(os.listdir("/proc/self/fd"))
        for step in range(1, 40):
            await run.sender.send(batch(step))
            await run.train(step)
        assert len(os.listdir("/proc/self/fd")) - before < 39  # some of shared memory, that the ranks have mapped
        assert run.sender.resume_after(0) == 39


class WatchedAccounts(PayloadAccounts):
    """Those of payloads, of which there are none: told of each batch as it is released."""

    def __init__(self) -> None:
        super().__init__(MemoryPayloadStore())
        self.let_go_of: list[int] = []

    def let_go(self, batch: int) -> None:
        super().let_go(batch)
        self.let_go_of.append(batch)


async def test_what_a_checkpoint_has_is_released_and_its_place_used_again(sockets: Path, tmp_path: Path) -> None:
    async with ends("shared memory", sockets, tmp_path) as run:
        run.sender.payloads = accounts = WatchedAccounts()
        for step in range(1, 41):
            await run.sender.send(batch(step))
            await run.train(step)
            if step % 2 == 0:
                run.sender.saved(step)
        while len(accounts.let_go_of) < 40:  # noqa: ASYNC110 - the last ones are acknowledged after they were saved
            await asyncio.sleep(0.001)
        await accounts.close()
        num_files = len(os.listdir(tmp_path))
    assert num_files <= 16  # two ranks', of the few batches that were there at a time


async def test_what_a_checkpoint_has_is_released_one_batch_in_a_turn_of_the_loop(sockets: Path, tmp_path: Path) -> None:
    async with ends("by value", sockets, tmp_path) as run:
        for step in range(1, 31):
            await run.sender.send(batch(step))
            await run.train(step)
        await run.sender.send(batch(31))  # once all but two were given back
        run.sender.payloads = accounts = WatchedAccounts()
        run.sender.saved(28)
        released = []
        for _ in range(60):
            released.append(len(accounts.let_go_of))
            await asyncio.sleep(0)
        assert max(after - before for before, after in itertools.pairwise(released)) == 1
        assert accounts.let_go_of == [*range(1, 29)]
        await accounts.close()


class WeighedPiece(Piece):
    """Knows how often it was weighed."""

    weighed = 0

    @property
    def num_bytes(self) -> int:
        WeighedPiece.weighed += 1
        return self.ref.num_bytes


class WeighingStore(ValueStore):
    def write(self, batch: PlannedBatch, sequence: int) -> list[Piece]:
        return [WeighedPiece(piece.ref, piece.body) for piece in super().write(batch, sequence)]


async def test_what_is_retained_is_weighed_once_and_not_at_every_step(sockets: Path) -> None:
    address = ipc_address(sockets, "weighed")
    sender = ChannelBatchSender(address, WeighingStore(), retained_bytes=PLENTY)
    receiver = ChannelBatchReceiver(address, ValueSource())
    for step in range(1, 31):
        await sender.send(plan([30], step=step, row_tokens=40))
        await receiver.receive()
        await receiver.acknowledge(step)
    await sender.send(plan([30], step=31, row_tokens=40))
    assert WeighedPiece.weighed == 31
    await receiver.close()
    await sender.close()


async def test_the_oldest_go_where_too_many_bytes_are_kept_and_cannot_be_asked_for(
    sockets: Path, tmp_path: Path
) -> None:
    async with ends("files", sockets, tmp_path, retained_bytes=1) as run:
        for step in (1, 2):
            await run.sender.send(batch(step))
            await run.train(step)
        while os.listdir(tmp_path):  # noqa: ASYNC110 - until the ranks' answers are there
            await asyncio.sleep(0.001)
        await run.sender.send(batch(3))
        await run.replace()
        with pytest.raises(TransportError, match="the batches of steps 1 to 2 are not kept any more"):
            run.sender.resume_after(0)
        assert run.sender.resume_after(2) == 1
        await run.train(3)


async def test_without_retaining_the_end_of_a_receiver_ends_the_queue(sockets: Path, tmp_path: Path) -> None:
    async with ends("shared memory", sockets, tmp_path, retained_bytes=None) as run:
        await run.sender.send(batch(1))
        await run.train(1)
        await run.ranks[1].close()

        async def go_on() -> None:
            for step in range(2, 7):
                await run.sender.send(batch(step))

        with pytest.raises(PeerGone):
            await go_on()


async def test_closing_ends_a_wait_for_receivers(sockets: Path, tmp_path: Path) -> None:
    async with ends("shared memory", sockets, tmp_path) as run:
        await run.sender.send(batch(1))
        await run.train(1)
        await run.replace()
        sending = asyncio.create_task(run.sender.send(batch(2)))
        await asyncio.sleep(0)
        await run.sender.close()
        with pytest.raises(PeerGone):
            await sending
