"""The other processes of `step_boundary.py`, each a function that answers commands over a pipe until told to end."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tailrace.records import Batch, PayloadRef
from tailrace.replay.memory import PeakMemory
from tailrace.transport.batches.channels import ChannelBatchReceiver
from tailrace.transport.batches.stores import FileSource
from tailrace.transport.payloads.slab_store import SlabPayloadStore
from tailrace.transport.payloads.store import PayloadStore

TOP_K = 8
_READ_AT_ONCE = 1 << 20
_CONTEXT = multiprocessing.get_context("spawn")


class Peer(AbstractContextManager["Peer"]):
    """A process that answers, one command at a time."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: object) -> object:
        """Its answer. Blocks; raises `EOFError` when it is gone."""
        self._pipe.send(command)
        return self._pipe.recv()

    def receive(self) -> object:
        """What it says unasked."""
        return self._pipe.recv()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def experts_of(num_tokens: int, layers: int, seed: int) -> NDArray[np.uint8]:
    """[num_tokens, layers, top_k], as an engine hands it over."""
    return np.random.default_rng(seed).integers(128, size=(num_tokens, layers, TOP_K), dtype=np.uint8)


def generator(pipe: Connection, folder: str) -> None:
    """Commands: (lengths, layers) of the turns of one step; the answer is their references and the time it took."""
    store = SlabPayloadStore(Path(folder), writer="generator")
    arrays: dict[tuple[int, int], list[NDArray[np.uint8]]] = {}
    while (command := _next(pipe)) is not None:
        lengths, layers = command
        kept = arrays.setdefault((max(lengths), layers), [])
        while len(kept) < 64:  # more than a processor's cache holds
            kept.append(experts_of(max(lengths), layers, len(kept)))
        started_s = time.perf_counter()
        refs = [store.put(kept[index % 64][:length]) for index, length in enumerate(lengths)]
        pipe.send((refs, time.perf_counter() - started_s))


@dataclass(frozen=True)
class Trained:
    """What one step took a trainer until all tensors were ready, all ranks one after the other."""

    wall_s: float
    open_s: float
    """Of it, until the batch's columns could be read."""
    experts_s: float
    """Of it, reading routed experts."""
    prepare_s: float
    """Of it, making micro-batches."""
    peak_bytes: int
    """Above what the process had before its first step."""
    tokens: int
    checksum: int


def trainer(pipe: Connection, address: str, folder: str, num_ranks: int) -> None:
    """Commands: anything; each makes it receive one step."""
    asyncio.run(_train(pipe, address, Path(folder), num_ranks))


async def _train(pipe: Connection, address: str, folder: Path, num_ranks: int) -> None:
    receivers = [
        ChannelBatchReceiver(address, FileSource(folder, recycled=True), rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    reader = RowReader(SlabPayloadStore(folder))
    pipe.send("connected")
    while await asyncio.to_thread(_next, pipe) is not None:
        pipe.send(await _train_step(receivers, reader))
    for receiver in receivers:
        await receiver.close()


class RowReader:
    """Rows to micro-batches of tensors, experts into memory that the next row's will take, as `Trainer`."""

    def __init__(self, store: PayloadStore) -> None:
        import tailrace.training.rows.micro_batch  # noqa: F401 - so that importing it is in no figure

        self._store = store
        self._room: NDArray[np.generic] | None = None
        self.experts_s = self.prepare_s = 0.0
        self.checksum = 0
        with PeakMemory() as memory:
            self.before_bytes = memory.before_bytes

    def read(self, batch: Batch) -> None:
        import torch

        from tailrace.training.rows.micro_batch import MicroBatch

        for index in range(batch.num_rows):
            row = batch.row(index)
            started_s = time.perf_counter()
            experts = row.payloads.read(self._store.open, out=self._room)
            self.experts_s += time.perf_counter() - started_s
            if experts is not None and (self._room is None or len(experts) > len(self._room)):
                self._room = experts
            if experts is not None:
                tensor = torch.from_numpy(experts)
                self.checksum += int(tensor[0].sum()) + int(tensor[-2].sum())
            started_s = time.perf_counter()
            MicroBatch.of(row, batch.summary.trainer_version, routed_experts=experts)
            self.prepare_s += time.perf_counter() - started_s


async def _train_step(receivers: list[ChannelBatchReceiver], reader: RowReader) -> Trained:
    reader.experts_s = reader.prepare_s = open_s = 0.0
    reader.checksum = tokens = 0
    with PeakMemory() as memory:
        started_s = time.perf_counter()
        for receiver in receivers:
            opening_s = time.perf_counter()
            batch = await receiver.receive()
            open_s += time.perf_counter() - opening_s
            await asyncio.to_thread(reader.read, batch)
            tokens += len(batch.token_ids)
            await receiver.acknowledge(batch.summary.step)
        wall_s = time.perf_counter() - started_s
    return Trained(
        wall_s,
        open_s,
        reader.experts_s,
        reader.prepare_s,
        memory.peak_bytes - reader.before_bytes,
        tokens,
        reader.checksum,
    )


def read_floor_s(path: Path, num_bytes: int) -> float:
    """Map a file afresh and read all of it once, a piece that fits a cache at a time."""
    started_s = time.perf_counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) as mapping:
        words = np.frombuffer(mapping, np.uint64)
        for start in range(0, len(words), _READ_AT_ONCE):
            words[start : start + _READ_AT_ONCE].sum()
        del words
    return time.perf_counter() - started_s


def _next(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except EOFError:
        return None


def refs_of(answer: object) -> tuple[list[PayloadRef], float]:
    """What a generator answered."""
    refs, wall_s = answer  # type: ignore[misc]
    return refs, wall_s
