"""What each way of carrying a batch promises beyond every queue: files, bytes, other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.free_ports import free_port
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.stores import (
    BatchStore,
    FileSource,
    FileStore,
    SharedMemoryStore,
    ValueSource,
    ValueStore,
)
from tailrace.transport.channels import ipc_address
from tailrace.transport.segments import ALIGNMENT_BYTES
from tests.transport.transport_builders import COLUMNS, assert_same_batch, make_batch, plan


@contextlib.asynccontextmanager
async def ends(sender: ChannelBatchSender, *receivers: ChannelBatchReceiver) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for receiver in receivers:
            await receiver.close()
        await sender.close()


async def test_a_batch_lies_in_files_that_safetensors_reads(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender, receiver = (
        ChannelBatchSender(address, SharedMemoryStore(tmp_path)),
        ChannelBatchReceiver(address, FileSource(tmp_path, recycled=True)),
    )
    async with ends(sender, receiver):
        batch = make_batch(1)
        await sender.send(batch)
        (path,) = tmp_path.iterdir()
        tensors, expected = safetensors.numpy.load_file(path), batch.assembled()
        for column in COLUMNS:
            np.testing.assert_array_equal(tensors[column], getattr(expected, column))


@pytest.mark.parametrize("kind", ["shared memory", "files", "by value"])
async def test_received_columns_are_aligned_views_that_cannot_be_written(
    kind: str, sockets: Path, tmp_path: Path
) -> None:
    address = ipc_address(sockets, "batches")
    sender, receiver = {
        "shared memory": lambda: (
            ChannelBatchSender(address, SharedMemoryStore(tmp_path)),
            ChannelBatchReceiver(address, FileSource(tmp_path, recycled=True)),
        ),
        "files": lambda: (
            ChannelBatchSender(address, FileStore(tmp_path)),
            ChannelBatchReceiver(address, FileSource(tmp_path)),
        ),
        "by value": lambda: (ChannelBatchSender(address, ValueStore()), ChannelBatchReceiver(address, ValueSource())),
    }[kind]()
    async with ends(sender, receiver):
        for step, tokens in ((1, 5), (2, 5000)):
            await sender.send(make_batch(step, tokens_per_sample=tokens))
            batch = await receiver.receive()
            for column in COLUMNS:
                array = getattr(batch, column)
                assert not array.flags.owndata, column
                assert not array.flags.writeable, column
                assert array.flags.aligned, column
                assert kind == "by value" or array.ctypes.data % ALIGNMENT_BYTES == 0, column


async def test_shared_memory_is_recycled(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender, receiver = (
        ChannelBatchSender(address, SharedMemoryStore(tmp_path)),
        ChannelBatchReceiver(address, FileSource(tmp_path, recycled=True)),
    )
    async with ends(sender, receiver):
        for step in range(1, 20):
            await sender.send(make_batch(step))
            assert_same_batch(await receiver.receive(), make_batch(step))
            await receiver.acknowledge(step)
        assert len(list(tmp_path.iterdir())) <= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [SharedMemoryStore, lambda _: ValueStore()], ids=["shared memory", "by value"])
def test_what_a_part_takes_is_counted_with_what_a_larger_one_left(
    make: Callable[[Path], BatchStore], tmp_path: Path
) -> None:
    store = make(tmp_path)
    (large,) = store.write(plan([100_000], step=1, row_tokens=100_000), 1)
    store.release(1)
    (small,) = store.write(plan([5], step=2), 2)
    assert small.num_bytes == large.num_bytes > large.ref.num_bytes > small.ref.num_bytes
    store.close()


async def test_a_rank_opens_no_other_ranks_rows(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender = ChannelBatchSender(address, FileStore(tmp_path), num_ranks=2)
    receivers = [ChannelBatchReceiver(address, FileSource(tmp_path), rank=rank, num_ranks=2) for rank in range(2)]
    async with ends(sender, *receivers):
        sent = make_batch(1, num_samples=6, num_ranks=2)
        await sender.send(sent)
        (other,) = tmp_path.glob("*/rank-1.safetensors")
        other.unlink()
        assert_same_batch(await receivers[0].receive(), sent, 0)
        with pytest.raises(TransportError, match="cannot open"):
            await receivers[1].receive()


async def test_a_receiver_of_another_number_of_ranks_is_refused(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender, receiver = (
        ChannelBatchSender(address, ValueStore()),
        ChannelBatchReceiver(address, ValueSource(), rank=0, num_ranks=2),
    )
    async with ends(sender, receiver):
        await sender.send(make_batch(1))
        with pytest.raises(CorruptData, match="rank 0 of 2 was sent the rows of rank 0 of 1"):
            await receiver.receive()


async def test_batches_reach_another_process_whose_end_is_noticed(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender = ChannelBatchSender(address, SharedMemoryStore(tmp_path), capacity=1)
    script = str(Path(__file__).with_name("batch_process.py"))
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, script, f"{address}", str(tmp_path), "2", stdout=asyncio.subprocess.PIPE
    )
    for step in (1, 2, 3):
        await sender.send(make_batch(step))
    with pytest.raises(PeerGone):
        await sender.send(make_batch(4))  # no room, and nobody there who could make some
    out, _ = await trainer.communicate()
    sums = [make_batch(step).assembled().token_ids.sum() for step in (1, 2)]
    assert out.decode().split("\n")[:2] == [f"{step} {total}" for step, total in enumerate(sums, 1)]
    await sender.close()
    assert not list(tmp_path.iterdir())


async def test_batches_go_by_tcp_as_well(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    sender, receiver = ChannelBatchSender(address, ValueStore()), ChannelBatchReceiver(address, ValueSource())
    async with ends(sender, receiver):
        await sender.send(make_batch(1, tokens_per_sample=100_000))
        assert_same_batch(await receiver.receive(), make_batch(1, tokens_per_sample=100_000))


async def test_a_full_folder_is_one_clear_message_and_costs_one_batch(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_file: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    address = ipc_address(sockets, "batches")
    ways: list[tuple[Callable[[Path], BatchStore], bool]] = [(SharedMemoryStore, True), (FileStore, False)]
    for make_store, recycled in ways:
        sender = ChannelBatchSender(address, make_store(tmp_path))
        receiver = ChannelBatchReceiver(address, FileSource(tmp_path, recycled=recycled))
        async with ends(sender, receiver):
            with monkeypatch.context() as patch:
                patch.setattr(os, "posix_fallocate", no_room)
                with pytest.raises(TransportError, match="has no room for"):
                    await sender.send(make_batch(1))
            await sender.send(make_batch(2))
            assert (await receiver.receive()).summary.step == 2
            assert len(list(tmp_path.glob("*batch-*"))) == 1


async def test_what_shared_memory_has_no_room_for_goes_to_files_and_is_told_once(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve, small = os.posix_fallocate, tmp_path / "small"
    small.mkdir()

    def nearly_full(file: int, start: int, size: int) -> None:
        if size > 100_000 and os.readlink(f"/proc/self/fd/{file}").startswith(str(small)):
            raise OSError(28, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    address, spill = ipc_address(sockets, "batches"), tmp_path / "spill"
    sender = ChannelBatchSender(address, SharedMemoryStore(small, spill=spill), num_ranks=2)
    receivers = [
        ChannelBatchReceiver(address, FileSource(small, recycled=True, spill=spill), rank=rank, num_ranks=2)
        for rank in range(2)
    ]
    with caplog.at_level(logging.WARNING):
        async with ends(sender, *receivers):
            for step, tokens in enumerate((10, 100_000, 100_000, 10, 120_000), 1):
                sent = make_batch(step, num_samples=4, tokens_per_sample=tokens, num_ranks=2)
                await sender.send(sent)
                for rank, receiver in enumerate(receivers):
                    assert_same_batch(await receiver.receive(), sent, rank)
                    await receiver.acknowledge(step)
            assert 1 <= len(list(spill.iterdir())) <= 4
    assert caplog.text.count("has no room for") == 1
    assert not list(small.iterdir())
    assert not spill.exists()


async def test_what_a_killed_sender_spilled_is_removed_by_the_next_one(sockets: Path, tmp_path: Path) -> None:
    memory, spill = tmp_path / "memory", tmp_path / "spill"
    for folder in (memory, spill):
        folder.mkdir()
    for name in ("spilled-batch-7-1.safetensors", "batch-00000001"):
        (spill / name).touch()
    sender = ChannelBatchSender(ipc_address(sockets, "batches"), SharedMemoryStore(memory, spill=spill))
    assert [path.name for path in spill.iterdir()] == ["batch-00000001"]  # what files accepted is not its own
    await sender.close()


async def test_what_files_no_longer_need_is_removed(sockets: Path, tmp_path: Path) -> None:
    for leftover in ("batch-00000007", ".half-written-batch-00000008"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    address = ipc_address(sockets, "batches")
    sender, receiver = (
        ChannelBatchSender(address, FileStore(tmp_path)),
        ChannelBatchReceiver(address, FileSource(tmp_path)),
    )
    async with ends(sender, receiver):
        await sender.send(make_batch(1))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("position", [-3000, -20000])
async def test_a_flipped_bit_in_a_file_is_noticed_before_it_is_trained_on(
    sockets: Path, tmp_path: Path, position: int
) -> None:
    address = ipc_address(sockets, "batches")
    sender, receiver = (
        ChannelBatchSender(address, FileStore(tmp_path)),
        ChannelBatchReceiver(address, FileSource(tmp_path)),
    )
    async with ends(sender, receiver):
        await sender.send(plan([65536 // 8 * 13] * 10))  # ends close to the end of its file
        (path,) = tmp_path.glob("*/rank-0.safetensors")
        content = bytearray(path.read_bytes())
        content[len(content) // 2 + position] ^= 4
        path.write_bytes(content)
        with pytest.raises(CorruptData, match="checksum differs"):
            await receiver.receive()
