"""What the shared memory queue promises beyond every queue: files, bytes, other processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transport_builders import COLUMNS, assert_same_batch, make_batch

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.records import PayloadTable
from tailrace.transport.batch_codec import batch_metadata, batch_tensors, read_batch
from tailrace.transport.channels import ipc_address
from tailrace.transport.segments import ALIGNMENT_BYTES, SegmentFile, TensorBuffers, map_segment, read_segment
from tailrace.transport.shared_memory import SharedMemoryBatchQueue, SharedMemoryBatchSender


def write(path: Path, *, checksum_body: bool = False) -> bytes:
    batch = make_batch(1)
    segment = SegmentFile(path)
    segment.write(batch_tensors(batch), batch_metadata(batch, checksum_body=checksum_body), 1)
    segment.close()
    return path.read_bytes()


def read(path: Path) -> object:
    return read_batch(path, read_segment(path, map_segment(path)))


async def test_a_batch_lies_in_a_file_that_safetensors_reads(sockets: Path, tmp_path: Path) -> None:
    queue = SharedMemoryBatchQueue(ipc_address(sockets, "batches"), tmp_path)
    batch = make_batch(1)
    await queue.send(batch)
    (path,) = tmp_path.iterdir()
    tensors = safetensors.numpy.load_file(path)
    for column in COLUMNS:
        np.testing.assert_array_equal(tensors[column], getattr(batch, column))
    await queue.close()


async def test_received_columns_are_aligned_views_that_cannot_be_written(sockets: Path, tmp_path: Path) -> None:
    queue = SharedMemoryBatchQueue(ipc_address(sockets, "batches"), tmp_path)
    await queue.send(make_batch(1))
    batch = await queue.receive()
    for column in COLUMNS:
        array = getattr(batch, column)
        assert not array.flags.owndata, column
        assert not array.flags.writeable, column
        assert array.ctypes.data % ALIGNMENT_BYTES == 0, column
    await queue.close()


async def test_files_are_recycled(sockets: Path, tmp_path: Path) -> None:
    queue = SharedMemoryBatchQueue(ipc_address(sockets, "batches"), tmp_path, capacity=2)
    for step in range(1, 20):
        await queue.send(make_batch(step))
        assert_same_batch(await queue.receive(), make_batch(step))
        await queue.acknowledge(step)
    assert len(list(tmp_path.iterdir())) <= 2
    await queue.close()


async def test_batches_reach_another_process_whose_end_is_noticed(sockets: Path, tmp_path: Path) -> None:
    address = ipc_address(sockets, "batches")
    sender = SharedMemoryBatchSender(address, tmp_path, capacity=1)
    script = str(Path(__file__).with_name("batch_process.py"))
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, script, address, str(tmp_path), "2", stdout=asyncio.subprocess.PIPE
    )
    for step in (1, 2, 3):
        await sender.send(make_batch(step))
    with pytest.raises(PeerGone):
        await sender.send(make_batch(4))  # no room, and nobody there who could make some
    out, _ = await trainer.communicate()
    assert out.decode().split("\n")[:2] == [f"{step} {make_batch(step).token_ids.sum()}" for step in (1, 2)]
    await sender.close()
    assert not list(tmp_path.iterdir())


async def test_a_full_folder_is_one_clear_message_and_costs_one_batch(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_file: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    queue = SharedMemoryBatchQueue(ipc_address(sockets, "batches"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(TransportError, match="has no room for"):
            await queue.send(make_batch(1))
    await queue.send(make_batch(2))
    assert (await queue.receive()).summary.step == 2
    await queue.close()


def test_a_tensor_of_thousands_of_buffers_is_written_whole(tmp_path: Path) -> None:
    pieces = [np.arange(step % 7, dtype=np.int32) + step for step in range(5000)]
    joined = np.concatenate(pieces)
    segment = SegmentFile(tmp_path / "segment")
    buffers = TensorBuffers("I32", joined.shape, [piece.view(np.uint8).data for piece in pieces])
    segment.write({"token_ids": buffers}, {}, 1)
    np.testing.assert_array_equal(safetensors.numpy.load_file(segment.path)["token_ids"], joined)
    segment.close()


def test_a_file_whose_writer_died_half_way_holds_nothing(tmp_path: Path) -> None:
    content = write(tmp_path / "batch")
    (tmp_path / "batch").write_bytes(content[:-16] + bytes(16))
    with pytest.raises(CorruptData, match="not written to its end"):
        read(tmp_path / "batch")


@given(length=st.integers(0, 65535))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_truncated_file_is_corrupt_data(tmp_path: Path, length: int) -> None:
    (tmp_path / "truncated").write_bytes(write(tmp_path / "batch")[:length])
    with pytest.raises(CorruptData):
        read(tmp_path / "truncated")


@given(position=st.integers(0, 5000), flip=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_byte_is_corrupt_data_or_in_padding(tmp_path: Path, position: int, flip: int) -> None:
    content = bytearray(write(tmp_path / "batch", checksum_body=True))
    content[position] ^= flip
    (tmp_path / "flipped").write_bytes(content)
    try:
        batch = read(tmp_path / "flipped")
    except CorruptData:
        return
    assert_same_batch(batch, make_batch(1, state=batch.scheduler_state))  # type: ignore[arg-type, attr-defined]


HOSTILE_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["I32", "F32", "BOOL", "U8", "BF16", "X"]),
        "shape": st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 20), max_size=3),
        "data_offsets": st.lists(st.integers(-(2**70), 2**70) | st.integers(-8, 500), min_size=1, max_size=3),
    }
)
NAMES = st.sampled_from([*COLUMNS, "scheduler_state", "__metadata__", "__trailer__", "__pad__1", "other"])


@given(header=st.dictionaries(NAMES, HOSTILE_ENTRIES | st.text() | st.dictionaries(st.text(), st.text())))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_hostile_header_with_a_right_checksum_is_corrupt_data(tmp_path: Path, header: dict[str, object]) -> None:

    assert_refused(tmp_path, json.dumps(header).encode())


@given(header=st.binary(max_size=300) | st.integers(1, 50_000).map(lambda depth: b"[" * depth))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_header_that_is_no_json_is_corrupt_data(tmp_path: Path, header: bytes) -> None:
    assert_refused(tmp_path, header)


def assert_refused(folder: Path, json: bytes) -> None:

    header = struct.pack("<Q", len(json)) + json
    trailer = struct.pack("<QQ", 1, xxhash.xxh3_64_intdigest(header))
    (folder / "hostile").write_bytes(header + bytes(512) + trailer)
    with pytest.raises(CorruptData):
        read(folder / "hostile")


@pytest.mark.parametrize(
    ("place", "value"),
    [((0, 0), 1), ((0, 1), 3), ((0, 1), 2**31 - 1), ((0, 2), 3), ((0, 2), -2), ((0, 3), -1), ((2, 3), 1), ((5, 1), 14)],
)
def test_chunks_of_payloads_that_mean_what_is_not_there_are_corrupt_data(
    tmp_path: Path, place: tuple[int, int], value: int
) -> None:
    sent = make_batch(1)
    chunks = sent.payloads.chunks.copy()
    chunks[place] = value
    batch = dataclasses.replace(sent, payloads=PayloadTable(chunks, sent.payloads.payloads))
    segment = SegmentFile(tmp_path / "batch")
    segment.write(batch_tensors(batch), batch_metadata(batch, checksum_body=False), 1)
    segment.close()
    with pytest.raises(CorruptData, match="payload_chunks"):
        read(tmp_path / "batch")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sample_offsets", [0, 99, 10, 15]),
        ("sample_offsets", [1, 5, 10, 15]),
        ("row_offsets", [0, 2, 1, 3]),
        ("row_offsets", [0, 4]),
        ("environment_ids", [0, 1, 0]),
        ("environment_ids", [0, -1, 0]),
    ],
)
def test_a_plan_that_reaches_beyond_its_columns_is_corrupt_data(tmp_path: Path, column: str, values: list[int]) -> None:

    batch = dataclasses.replace(make_batch(1), **{column: np.array(values, np.int32)})
    segment = SegmentFile(tmp_path / "batch")
    segment.write(batch_tensors(batch), batch_metadata(batch, checksum_body=False), 1)
    segment.close()
    with pytest.raises(CorruptData, match=column):
        read(tmp_path / "batch")
