"""A payload store of files: in shared memory for the processes of one host, in a shared folder for those of several.

    generator     put ──► the slab in use ──full──► sealed slabs ──all released──► used again, oldest first
    orchestrator  release ──► tallies beside the slabs; what a writer that died left is deleted once released
    trainer       open ──► a mapping that is kept for as long as its file is there

Payloads of many requests share a slab, so a step of a thousand turns makes no thousand files, and no page is fresh but
those of a store that grows. The folder belongs to one run: it is locked by the run's owner and goes with it (see
`transport.owned_folders`), and a run that resumes begins with an empty one, since rollouts in flight start over.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tailrace.errors import CorruptData, NoRoom, TransportError
from tailrace.records import PayloadRef
from tailrace.transport.payloads.slabs import (
    SLAB_SUFFIX,
    MappedSlab,
    OwnedSlab,
    PayloadAddress,
    Tallies,
    slab_bytes_for,
    slab_path,
    tallies_path,
    write_tally,
)
from tailrace.transport.payloads.store import PayloadStore

_logger = logging.getLogger(__name__)

SLAB_BYTES = 32 << 20
"""One payload that is not released keeps that much from being used again; a step's payloads fill some dozens."""

SHARED_MEMORY, FOLDER = "shm", "folder"
"""Stores, as references name them."""


class SlabPayloadStore(PayloadStore):
    """One process's end of a store in `folder`. See `PayloadStore`.

    `writer` names this end where it puts: no other end of the folder has that name, nor ever had it. `name` is
    `SHARED_MEMORY`, whose slabs stay mapped, or `FOLDER`.
    """

    def __init__(
        self, folder: Path, *, writer: str = "", name: str = SHARED_MEMORY, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._folder, self._name = folder, name
        self._pool = _Pool(folder, writer, slab_bytes, is_mapped=name == SHARED_MEMORY)
        self._mapped: dict[str, MappedSlab] = {}
        self._tallies = _Tallies(folder)
        self._putting, self._opening, self._releasing = threading.Lock(), threading.Lock(), threading.Lock()

    @override
    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        contiguous = np.ascontiguousarray(array)
        with self._putting:
            try:
                slab = self._pool.with_room(contiguous.nbytes)
                generation, offset = slab.append(contiguous, array.shape)
            except OSError as error:
                raise TransportError(f"a payload cannot be written to {self._folder}: {error.strerror}") from error
        address = PayloadAddress(self._name, slab.path.name, generation, offset)
        return PayloadRef(address.uri(), str(array.dtype), array.shape)

    @override
    def withdraw(self, ref: PayloadRef) -> None:
        address = self._address(ref)
        with self._putting:
            self._pool.withdraw(address)

    @override
    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        address = self._address(ref)
        with self._opening:
            slab = self._mapped.get(address.slab)
            if slab is None:
                slab = self._map(address.slab)
        return slab.array(ref, address)

    @override
    def release(self, refs: Iterable[PayloadRef]) -> None:
        counts = Counter((address.slab, address.generation) for address in map(self._address, refs))
        with self._releasing:
            for (slab, generation), count in counts.items():
                self._tallies.add(slab, generation, count)

    @override
    def abandon(self, writer: str, held: Iterable[PayloadRef]) -> None:
        counts = Counter(self._address(ref).slab for ref in held)
        with self._releasing:
            for path in self._folder.glob(f"{writer}-*{SLAB_SUFFIX}"):
                self._tallies.abandon(path.name, counts[path.name])
            tallies_path(self._folder, writer).unlink(missing_ok=True)

    @override
    def close(self) -> None:
        """What was put stays: the files go with their folder."""
        with self._putting, self._opening:
            self._pool.close()
            self._mapped.clear()

    def _address(self, ref: PayloadRef) -> PayloadAddress:
        address = PayloadAddress.of(ref)
        if address.store != self._name:
            raise CorruptData(f"{ref.uri} is of another store than {self._folder}")
        return address

    def _map(self, slab: str) -> MappedSlab:
        """A fresh mapping. Mappings of deleted files are dropped: each would keep its file's memory."""
        self._mapped = {name: mapped for name, mapped in self._mapped.items() if mapped.path.exists()}
        mapped = self._mapped[slab] = MappedSlab(self._folder / slab)
        return mapped


class _Pool:
    """The slabs of one writer: one in use, the others sealed, oldest first.

    No pool of files that are lent, as batches have: many payloads share a slab, and the process that releases them is
    another one.
    """

    def __init__(self, folder: Path, writer: str, slab_bytes: int, *, is_mapped: bool) -> None:
        self._folder, self._writer, self._slab_bytes = folder, writer, slab_bytes
        self._is_mapped = is_mapped
        self._slabs: list[OwnedSlab] = []  # the one in use last
        self._created = 0
        self._is_closed = False

    def with_room(self, num_bytes: int) -> OwnedSlab:
        """The slab in use, or an old one that starts over, or a new one. Raises `NoRoom` where none can be."""
        if self._is_closed or not self._writer:
            raise TransportError(f"the payload store in {self._folder} is not one to put into")
        if self._slabs:
            if self._slabs[-1].room >= num_bytes:
                return self._slabs[-1]
            self._slabs[-1].close()
        size = max(self._slab_bytes, slab_bytes_for(num_bytes))
        tallies = Tallies(tallies_path(self._folder, self._writer))
        slab = next((slab for slab in self._slabs if slab.size >= size and slab.is_released(tallies)), None)
        if slab is None:
            path = slab_path(self._folder, self._writer, self._created + 1)
            slab = OwnedSlab(path, size, is_mapped=self._is_mapped)
            self._created += 1
        else:
            self._slabs.remove(slab)
            slab.start_over()
        self._slabs.append(slab)
        return slab

    def withdraw(self, address: PayloadAddress) -> None:
        """A payload of it will never be released by anybody else."""
        for slab in self._slabs:
            if (slab.path.name, slab.generation) == (address.slab, address.generation):
                slab.withdrawn += 1

    def close(self) -> None:
        """Close all files, which stay."""
        self._is_closed = True
        while self._slabs:
            self._slabs.pop().close()


class _Tallies:
    """What the one process that releases knows of the slabs of all writers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._released: dict[str, tuple[int, int]] = {}  # generation, payloads
        self._abandoned: dict[str, int] = {}  # payloads that are still held

    def add(self, slab: str, generation: int, count: int) -> None:
        """Count `count` more payloads as released."""
        if slab in self._abandoned:
            self.abandon(slab, self._abandoned[slab] - count)
            return
        counted, released = self._released.get(slab, (generation, 0))
        total = count + (released if counted == generation else 0)
        self._released[slab] = (generation, total)
        path = self._folder / slab
        if path.exists():  # or its writer has closed
            write_tally(path, generation, total)
        else:
            del self._released[slab]

    def abandon(self, slab: str, held: int) -> None:
        """Its writer is gone and `held` of its payloads are not released yet: the last one deletes it."""
        self._released.pop(slab, None)
        if held > 0:
            self._abandoned[slab] = held
            return
        self._abandoned.pop(slab, None)
        (self._folder / slab).unlink(missing_ok=True)


class OverflowingPayloadStore(PayloadStore):
    """Shared memory for as long as there is room, then a folder; a reference names which."""

    def __init__(self, memory: SlabPayloadStore, folder: SlabPayloadStore) -> None:
        self._memory, self._folder = memory, folder
        self._has_overflowed = False

    @override
    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        """Shared memory is tried anew every time: what is released makes room."""
        try:
            return self._memory.put(array)
        except NoRoom as error:
            if not self._has_overflowed:
                _logger.warning("%s; until there is room payloads go to a folder, which is slower", error)
            self._has_overflowed = True
            return self._folder.put(array)

    @override
    def withdraw(self, ref: PayloadRef) -> None:
        self._store_of(ref).withdraw(ref)

    @override
    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        return self._store_of(ref).open(ref)

    @override
    def release(self, refs: Iterable[PayloadRef]) -> None:
        for store, own in self._by_store(refs).items():
            store.release(own)

    @override
    def abandon(self, writer: str, held: Iterable[PayloadRef]) -> None:
        by_store = self._by_store(held)
        for store in (self._memory, self._folder):
            store.abandon(writer, by_store.get(store, ()))

    @override
    def close(self) -> None:
        self._memory.close()
        self._folder.close()

    def _store_of(self, ref: PayloadRef) -> SlabPayloadStore:
        """The one it names; the folder's refuses what names neither."""
        return self._memory if ref.uri.startswith(f"{SHARED_MEMORY}:") else self._folder

    def _by_store(self, refs: Iterable[PayloadRef]) -> dict[SlabPayloadStore, list[PayloadRef]]:
        by_store: dict[SlabPayloadStore, list[PayloadRef]] = {}
        for ref in refs:
            by_store.setdefault(self._store_of(ref), []).append(ref)
        return by_store
