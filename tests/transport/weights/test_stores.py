"""Promises of every model state dict store, and those of shared memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tailrace.errors import CorruptData, TransportError
from tailrace.records import ModelStateDictRef
from tailrace.transport.weights.stores import (
    MemoryModelStateDictStore,
    ModelStateDictStore,
    SharedMemoryModelStateDictStore,
    remove_published,
)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {
        "fp32": torch.full((3, 5), value),
        "bf16": torch.full((7,), value, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).t() + value,
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(3),
    }


def assert_equal(opened: object, expected: dict[str, torch.Tensor]) -> None:
    assert set(opened) == set(expected)  # type: ignore[call-overload]
    for name, tensor in expected.items():
        torch.testing.assert_close(opened[name], tensor, rtol=0, atol=0)  # type: ignore[index]


@pytest.fixture(params=["memory", "shared memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelStateDictStore]:
    store: ModelStateDictStore = (
        MemoryModelStateDictStore() if request.param == "memory" else SharedMemoryModelStateDictStore(tmp_path)
    )
    yield store
    store.close()
    store.close()


def test_what_is_published_is_opened_bit_for_bit(store: ModelStateDictStore) -> None:
    ref = store.publish(weights(1.5), version=3)
    assert (ref.version, ref.num_bytes) == (3, sum(tensor.nbytes for tensor in weights(1.5).values()))
    with store.open(ref) as opened:
        assert opened.version == 3
        assert_equal(opened, weights(1.5))


def test_the_store_keeps_a_copy(store: ModelStateDictStore) -> None:
    tensors = weights(1)
    ref = store.publish(tensors, version=1)
    tensors["fp32"].zero_()
    with store.open(ref) as opened:
        assert_equal(opened, weights(1))


def test_a_reference_whose_place_was_recycled_opens_newer_weights_and_says_so(store: ModelStateDictStore) -> None:
    refs = [store.publish(weights(version), version) for version in range(1, 8)]
    for ref in refs:
        with store.open(ref) as opened:
            assert opened.version >= ref.version
            assert_equal(opened, weights(opened.version))


def test_what_a_reader_has_open_is_not_overwritten(store: ModelStateDictStore) -> None:
    with store.open(store.publish(weights(1), 1)) as opened:
        for version in range(2, 9):
            store.publish(weights(version), version)
        assert opened.version == 1
        assert_equal(opened, weights(1))


def test_a_reference_into_a_closed_store_of_one_process_is_refused() -> None:
    store = MemoryModelStateDictStore()
    ref = store.publish(weights(1), 1)
    store.close()
    with pytest.raises(TransportError), store.open(ref):
        pass


def test_files_are_recycled_and_two_are_enough_without_a_reader(tmp_path: Path) -> None:
    store = SharedMemoryModelStateDictStore(tmp_path)
    for version in range(1, 9):
        with store.open(store.publish(weights(version), version)):
            pass
    assert len(list(tmp_path.iterdir())) == 2
    store.close()


def test_a_publisher_that_ends_leaves_the_newest_file_and_to_readers_what_they_have_open(tmp_path: Path) -> None:
    publisher, reader = SharedMemoryModelStateDictStore(tmp_path), SharedMemoryModelStateDictStore(tmp_path)
    refs = [publisher.publish(weights(version), version) for version in (1, 2)]
    with reader.open(refs[0]) as first, reader.open(refs[1]) as second:
        newest = publisher.publish(weights(3), 3)
        publisher.close()
        assert [path.name for path in tmp_path.iterdir()] == [newest.uri]
        assert_equal(first, weights(1))
        assert_equal(second, weights(2))
    with reader.open(newest) as opened:
        assert_equal(opened, weights(3))


def test_lives_of_a_publisher_keep_apart_and_earlier_ones_are_forgotten(tmp_path: Path) -> None:
    """Though their process ids are the same, as in containers."""
    lives = [SharedMemoryModelStateDictStore(tmp_path, life) for life in (0, 1, 10)]
    for life in lives[:2]:
        life.publish(weights(1), 1)
    ref = lives[2].publish(weights(2), 2)
    with lives[0].open(ref):
        assert len([*tmp_path.iterdir()]) == 3
    for life in lives:
        life.close()
    remove_published(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == [ref.uri]


READER_THAT_DIES = """
import os, pathlib, sys
from tailrace.records import ModelStateDictRef
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore
store = SharedMemoryModelStateDictStore(pathlib.Path(sys.argv[1]))
with store.open(ModelStateDictRef(version=1, uri=sys.argv[2], num_bytes=0)) as opened:
    print(opened.version, float(opened["fp32"].sum()), flush=True)
    sys.stdin.read()
    os._exit(9)
"""


def test_another_process_reads_and_the_kernel_lets_go_of_its_lock_when_it_dies(tmp_path: Path) -> None:
    store = SharedMemoryModelStateDictStore(tmp_path)
    ref = store.publish(weights(1), 1)
    command = [sys.executable, "-c", READER_THAT_DIES, str(tmp_path), ref.uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == "1 15.0\n"
        used = {store.publish(weights(version), version).uri for version in range(2, 6)}
        assert ref.uri not in used
        reader.communicate("")
    assert ref.uri in {store.publish(weights(version), version).uri for version in range(6, 9)}
    store.close()


def test_damaged_or_misleading_references_are_corrupt_data(tmp_path: Path) -> None:
    store = SharedMemoryModelStateDictStore(tmp_path)
    ref = store.publish(weights(1), 1)
    for uri, version in ((f"../{tmp_path.name}/{ref.uri}", 1), (ref.uri, 2)):
        with pytest.raises(CorruptData), store.open(ModelStateDictRef(version=version, uri=uri, num_bytes=0)):
            pass
    path = tmp_path / ref.uri
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptData), store.open(ref):
        pass
    store.close()


def test_tensors_that_were_overwritten_are_not_lent(tmp_path: Path) -> None:
    store = SharedMemoryModelStateDictStore(tmp_path)
    ref = store.publish(weights(1), 1)
    path = tmp_path / ref.uri
    content = bytearray(path.read_bytes())
    body = 8 + int.from_bytes(content[:8], "little")  # beyond the header, as safetensors has it
    content[body + 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptData, match=r"the tensors of .* are damaged"), store.open(ref):
        pass
    with store.open(store.publish(weights(2), 2)) as opened:
        assert_equal(opened, weights(2))
    store.close()


def test_a_tensor_of_a_type_that_cannot_travel_is_named(tmp_path: Path) -> None:
    store = SharedMemoryModelStateDictStore(tmp_path)
    with pytest.raises(TransportError, match="'phase'"):
        store.publish({"phase": torch.zeros(2, dtype=torch.complex64)}, 1)
    store.close()


def test_importing_transport_does_not_import_torch() -> None:
    code = (
        "import sys, tailrace.transport.weights.stores, tailrace.transport.batches.channels, "
        "tailrace.transport.events.rpc; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
