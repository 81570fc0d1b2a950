"""What every payload store promises, and those of files beyond: recycling, bounds, crashes, bad references."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.errors import CorruptData, NoRoom, PayloadLost, TransportError
from tailrace.records import PayloadRef
from tailrace.transport.payloads.slab_store import FOLDER, SHARED_MEMORY, OverflowingPayloadStore, SlabPayloadStore
from tailrace.transport.payloads.store import MemoryPayloadStore, PayloadStore

SLAB = 1 << 16
NEAR_ALL = (SLAB - 300,)
"""Shape of a payload that has a slab to itself."""


class FullStore(SlabPayloadStore):
    """Has no room."""

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        raise NoRoom("no room")


def size_of_slabs(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.slab"))


STORES: dict[str, Callable[[Path], PayloadStore]] = {
    "memory": lambda _: MemoryPayloadStore(),
    "shared memory": lambda folder: SlabPayloadStore(folder, writer="w", slab_bytes=SLAB),
    "folder": lambda folder: SlabPayloadStore(folder, writer="w", name=FOLDER, slab_bytes=SLAB),
    "overflowing": lambda folder: OverflowingPayloadStore(
        FullStore(folder, writer="w", slab_bytes=SLAB),
        SlabPayloadStore(folder, writer="w", name=FOLDER, slab_bytes=SLAB),
    ),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PayloadStore]:
    made = STORES[request.param](tmp_path)
    yield made
    made.close()


def experts(seed: int, num_tokens: int = 50, dtype: str = "uint8") -> NDArray[np.generic]:
    return np.random.default_rng(seed).integers(0, 128, (num_tokens, 4, 2)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_what_was_put_is_opened_whole_and_cannot_be_written(store: PayloadStore, dtype: str) -> None:
    refs = [store.put(experts(seed, 50 + seed, dtype)) for seed in range(5)]
    for seed, ref in enumerate(refs):
        opened = store.open(ref)
        assert not opened.flags.writeable
        assert opened.dtype == dtype
        np.testing.assert_array_equal(opened, experts(seed, 50 + seed, dtype))


def test_an_array_that_is_a_stretch_of_another_or_empty_is_kept_as_well(store: PayloadStore) -> None:
    whole = experts(1, 60)
    for part in (whole[10:20], whole[::3], whole[:0], whole[:, 1:]):
        np.testing.assert_array_equal(store.open(store.put(part)), part)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "uint16"},
        {"dtype": "object"},
        {"dtype": "V8"},
        {"dtype": "float64, int8"},
        {"shape": (49, 4, 2)},
        {"shape": (400,)},
        {"shape": (50, 4, -2)},
        {"shape": (2**62, 2**62, 2**62)},
        {"shape": (1,) * 70},
        {"shape": ()},
    ],
)
def test_a_reference_to_something_else_than_was_put_is_corrupt(store: PayloadStore, change: dict[str, object]) -> None:
    ref = store.put(experts(1))
    fields: dict[str, object] = {"uri": ref.uri, "dtype": ref.dtype, "shape": ref.shape} | change
    with pytest.raises(CorruptData):
        store.open(PayloadRef(**fields))  # type: ignore[arg-type]


URIS = [
    "",
    "shm:",
    "shm:../secret.slab@1+64",
    "shm:/etc/passwd@1+64",
    "shm:.hidden.slab@1+64",
    "shm:w-1.slab@1+63",
    "shm:w-1.slab@1+0",
    "shm:w-1.slab@1+128",
    "shm:w-1.slab@1+999999999999999999",
    "shm:w-1.slab@1+9999999999999999999999",
    "shm:w-1.slab@-1+64",
    "shm:w-1.slab@1+64\n",
    "shm:w-1.released@1+64",
    "folder:w-1.slab@1+64",
    "memory:1",
]


@pytest.mark.parametrize("uri", URIS)
def test_a_reference_that_points_elsewhere_is_corrupt(tmp_path: Path, uri: str) -> None:
    store = STORES["shared memory"](tmp_path)
    ref = store.put(experts(1))
    with pytest.raises(CorruptData):
        store.open(PayloadRef(uri, ref.dtype, ref.shape))


@given(uri=st.text(max_size=60) | st.from_regex(r"shm:w-1\.slab@\d{1,3}\+\d{1,6}", fullmatch=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_made_up_reference_is_a_transport_error(tmp_path_factory: pytest.TempPathFactory, uri: str) -> None:
    store = STORES["shared memory"](tmp_path_factory.mktemp("payloads"))
    ref = store.put(experts(1))
    if uri == ref.uri:
        return
    with pytest.raises(TransportError):
        store.open(PayloadRef(uri, ref.dtype, ref.shape))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    ref = SlabPayloadStore(outside, writer="w").put(experts(1))
    (inside / "w-1.slab").symlink_to(outside / "w-1.slab")
    with pytest.raises(PayloadLost):
        SlabPayloadStore(inside).open(ref)


@given(content=st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_that_is_no_slab_is_corrupt_or_lost(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x-1.slab").write_bytes(content)
    with pytest.raises(TransportError):
        SlabPayloadStore(tmp_path).open(PayloadRef("shm:x-1.slab@1+64", "uint8", (4,)))


@given(position=st.integers(0, 700), flip=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_byte_of_a_slab_is_a_typed_error_or_content(tmp_path: Path, position: int, flip: int) -> None:
    folder = tmp_path / f"{position}-{flip}"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    ref = SlabPayloadStore(folder, writer="w", slab_bytes=SLAB).put(experts(1))
    content = bytearray((folder / "w-1.slab").read_bytes())
    content[position] ^= flip
    (folder / "w-1.slab").write_bytes(content)
    try:
        assert SlabPayloadStore(folder).open(ref).shape == ref.shape
    except TransportError:
        return


def test_another_end_opens_what_one_end_put_and_room_is_used_again(tmp_path: Path) -> None:
    writer, trainer, ledger = (SlabPayloadStore(tmp_path, writer=name, slab_bytes=SLAB) for name in ("w", "", ""))
    for seed in range(30):
        whole = np.random.default_rng(seed).integers(0, 255, NEAR_ALL).astype(np.uint8)
        ref = writer.put(whole)
        np.testing.assert_array_equal(trainer.open(ref), whole)
        ledger.release([ref])
    assert len(list(tmp_path.glob("*.slab"))) == 1
    assert size_of_slabs(tmp_path) == SLAB


def test_a_slab_is_used_again_only_when_all_of_its_payloads_are_released(tmp_path: Path) -> None:
    writer, ledger = SlabPayloadStore(tmp_path, writer="w", slab_bytes=SLAB), SlabPayloadStore(tmp_path)
    kept = writer.put(experts(0))
    for _ in range(3):
        ledger.release([writer.put(np.zeros(NEAR_ALL, np.uint8))])
    np.testing.assert_array_equal(ledger.open(kept), experts(0))
    ledger.release([kept])
    for _ in range(3):
        ledger.release([writer.put(np.zeros(NEAR_ALL, np.uint8))])
    with pytest.raises(PayloadLost):
        ledger.open(kept)
    assert len(list(tmp_path.glob("*.slab"))) == 2


def test_to_find_a_slab_that_is_released_takes_one_look_however_many_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, ledger = SlabPayloadStore(tmp_path, writer="w", slab_bytes=SLAB), SlabPayloadStore(tmp_path)
    held = [[writer.put(np.zeros(100, np.uint8)), writer.put(np.zeros(NEAR_ALL, np.uint8))] for _ in range(20)]
    for refs in held:
        ledger.release(refs[1:])
    looks, read = list[Path](), Path.read_bytes
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: looks.append(path) or read(path))
        writer.put(np.zeros(NEAR_ALL, np.uint8))
    assert len(looks) == 1
    before = size_of_slabs(tmp_path)
    ledger.release(held[13][:1])
    writer.put(np.zeros(NEAR_ALL, np.uint8))
    assert size_of_slabs(tmp_path) == before


def test_what_was_withdrawn_holds_no_room(tmp_path: Path) -> None:
    writer = SlabPayloadStore(tmp_path, writer="w", slab_bytes=SLAB)
    for _ in range(5):
        writer.withdraw(writer.put(np.zeros(NEAR_ALL, np.uint8)))
    assert len(list(tmp_path.glob("*.slab"))) == 1


@pytest.mark.parametrize("name", [SHARED_MEMORY, FOLDER])
def test_payloads_that_are_held_keep_no_file_open_but_their_mappings(tmp_path: Path, name: str) -> None:
    writer = SlabPayloadStore(tmp_path, writer="w", name=name, slab_bytes=SLAB)
    before = len(os.listdir("/proc/self/fd"))
    refs = [writer.put(np.full(NEAR_ALL, seed, np.uint8)) for seed in range(20)]
    mapped = 20 if name == SHARED_MEMORY and sys.version_info < (3, 13) else 0
    assert len(os.listdir("/proc/self/fd")) - before <= max(1, mapped)
    SlabPayloadStore(tmp_path, name=name).release(refs)
    again = writer.put(np.full(NEAR_ALL, 99, np.uint8))
    np.testing.assert_array_equal(writer.open(again), np.full(NEAR_ALL, 99, np.uint8))
    assert len(list(tmp_path.glob("*.slab"))) == 20
    writer.close()


def test_a_payload_larger_than_a_slab_has_one_of_its_own(tmp_path: Path) -> None:
    store = SlabPayloadStore(tmp_path, writer="w", slab_bytes=SLAB)
    large = np.arange(3 * SLAB, dtype=np.uint32)
    np.testing.assert_array_equal(store.open(store.put(large)), large)


def full_where(folder: Path) -> Callable[[int, int, int], None]:
    reserve = os.posix_fallocate

    def reserve_elsewhere(file: int, start: int, size: int) -> None:
        if folder in Path(f"/proc/self/fd/{file}").readlink().parents:
            full(file, start, size)
        reserve(file, start, size)

    return reserve_elsewhere


def full(_file: int, _start: int, _size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_shared_memory_is_one_clear_message_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"no room for .* enlarge it"):
        SlabPayloadStore(tmp_path, writer="w").put(experts(1))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_a_transport_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be written to"):
        SlabPayloadStore(tmp_path / "gone", writer="w").put(experts(1))


def test_full_shared_memory_sends_payloads_to_a_folder_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, folder = tmp_path / "memory", tmp_path / "folder"
    memory.mkdir()
    folder.mkdir()
    writer, reader = (
        OverflowingPayloadStore(
            SlabPayloadStore(memory, writer=name, slab_bytes=SLAB),
            SlabPayloadStore(folder, writer=name, name=FOLDER, slab_bytes=SLAB),
        )
        for name in ("w", "")
    )
    whole = np.arange(NEAR_ALL[0], dtype=np.uint16).astype(np.uint8)
    first = writer.put(whole)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full_where(memory))
        second = writer.put(whole)
    assert [ref.uri.partition(":")[0] for ref in (first, second)] == ["shm", "folder"]
    for ref in (first, second):
        np.testing.assert_array_equal(reader.open(ref), whole)
    reader.release([first, second])
    assert writer.put(whole).uri.startswith("shm:")


def test_what_a_dead_writer_left_is_deleted_with_the_last_payload_that_somebody_holds(tmp_path: Path) -> None:
    dead, ledger = SlabPayloadStore(tmp_path, writer="w.0", slab_bytes=SLAB), SlabPayloadStore(tmp_path)
    other = SlabPayloadStore(tmp_path, writer="w.01", slab_bytes=SLAB).put(experts(9))
    held = dead.put(experts(1))
    unheard_of = dead.put(experts(2))
    full_of_unheard = dead.put(np.zeros(NEAR_ALL, np.uint8))
    dead.close()
    ledger.abandon("w.0", [held, other])
    np.testing.assert_array_equal(ledger.open(held), experts(1))
    with pytest.raises(PayloadLost):
        ledger.open(full_of_unheard)
    ledger.release([held])
    for gone in (held, unheard_of):
        with pytest.raises(PayloadLost):
            SlabPayloadStore(tmp_path).open(gone)
    assert [path.name for path in tmp_path.glob("w*")] == ["w.01-1.slab"]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "release", "withdraw", "die"]), st.integers(0, 9)))


@given(operations=OPERATIONS, sizes=st.lists(st.sampled_from([10, 3000, 20000, SLAB, 3 * SLAB]), min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_happens_nothing_held_is_lost_and_nothing_released_stays(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]], sizes: list[int]
) -> None:
    """Against a plain model: a dictionary of what is held. In the end everything is released, and all room is free."""
    folder = tmp_path_factory.mktemp("payloads")
    ledger, trainer = SlabPayloadStore(folder), SlabPayloadStore(folder)
    life, held = 0, dict[PayloadRef, NDArray[np.generic]]()
    writer = SlabPayloadStore(folder, writer=f"w.{life}", slab_bytes=SLAB)
    for number, (operation, choice) in enumerate(operations):
        victims = list(held)[choice::10]
        if operation == "put":
            array = np.random.default_rng(number).integers(0, 255, sizes[number % len(sizes)]).astype(np.uint8)
            ref = writer.put(array)
            assert ref not in held
            held[ref] = array
        elif operation == "release":
            ledger.release(victims)
            for ref in victims:
                del held[ref]
        elif operation == "withdraw":
            writer.withdraw(writer.put(np.zeros(100, np.uint8)))
        else:
            writer.put(np.zeros(7, np.uint8))  # its reference dies with it
            ledger.abandon(f"w.{life}", held)
            life += 1
            writer = SlabPayloadStore(folder, writer=f"w.{life}", slab_bytes=SLAB)
    for ref, array in held.items():
        np.testing.assert_array_equal(trainer.open(ref), array)
    ledger.release(held)
    assert {path.name.partition("-")[0] for path in folder.glob("*.slab")} <= {f"w.{life}"}
    before = size_of_slabs(folder)
    for _ in folder.glob("*.slab"):
        writer.put(np.zeros(NEAR_ALL, np.uint8))
    assert size_of_slabs(folder) == before
