"""Sending a batch: what the event loop pays, and how long it takes until every rank has its rows.

    groups ──sample, form──► plan ──send──► (a thread writes) ──► receive, rank by rank

64 rollouts of 20 turns (2.6 million tokens) and four times as many, for 8 data-parallel ranks, through each of the
carriers. `loop_s` is the time of the turns that the event loop gave to `send` and to tasks that were made meanwhile,
as that one which writes and sends: all that a size could cost others.
`form_s` is that of sampling and forming, in slices of at most `form_slice_max_s`. `wall_s` is from the call of `send`
to its return, `receive_s` until the last rank has mapped (or received) its rows, `write_floor_s` one plain write of as
many bytes into a file of recycled shared memory. Medians of the rounds after the first, whose memory is fresh.

    python benchmarks/batch_queue.py [--json] [--quick] [--case zmq]
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailrace.batching import Packing, SampledGroup, compute_advantages, sample_group
from tailrace.batching.batches import form_batch
from tailrace.lifecycle.event_loop import run_on_event_loop
from tailrace.records import Group, PlannedBatch
from tailrace.replay.synthetic import SyntheticLoad, synthetic_groups
from tailrace.tracing.watched_tasks import watching_task_factory
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.queue import BatchReceiver, BatchSender, MemoryBatchQueue
from tailrace.transport.batches.stores import FileSource, FileStore, SharedMemoryStore, ValueSource, ValueStore
from tailrace.transport.channels import ipc_address
from tailrace.transport.owned_folders import own_shared_memory, own_socket_folder

RANKS = 8
TARGET_S = 1e-3
CARRIERS = ("memory", "shared_memory", "files", "zmq")


@dataclass(frozen=True, slots=True)
class Row:
    """One carrier and size."""

    case: str
    tokens: int
    ranks: int
    batch_bytes: int
    form_s: float
    form_slice_max_s: float
    loop_s: float
    wall_s: float
    receive_s: float
    write_floor_s: float
    target: float
    met: bool


class LoopTime:
    """Adds up the time of turns that tasks take from the event loop."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def begin_turn(self) -> None:
        self._began_s = time.perf_counter()

    def end_turn(self) -> None:
        self.total_s += time.perf_counter() - self._began_s


def main() -> None:
    """Run the chosen cases."""
    options = kit.parse_options(__doc__)
    carriers, rows = options.choose(CARRIERS), []
    for rollouts in (64,) if options.quick else (64, 256):
        groups = synthetic_groups(SyntheticLoad(rollouts=rollouts))
        for group in groups:
            compute_advantages(group, "mean")
        for carrier in carriers:
            kit.progress(f"{carrier}: {rollouts} rollouts ...")
            rows.append(run_on_event_loop(measure(carrier, groups, rounds=5 if options.quick else 15)))
    kit.report("Sending a batch", rows, options)


async def measure(carrier: str, groups: Sequence[Group], *, rounds: int) -> Row:
    """One carrier, the same groups again and again."""
    formed, sent = [], []
    epoch = uuid.uuid4().hex
    with (
        own_shared_memory(epoch) as memory,
        own_socket_folder(epoch) as sockets,
        tempfile.TemporaryDirectory() as folder,
    ):
        sender, receivers = open_queue(carrier, ipc_address(sockets.path, "batches"), memory.path, Path(folder))
        for step in range(1, rounds + 1):
            batch, slices_s = form(groups, step)
            formed.append(slices_s)
            sent.append(await send(sender, receivers, batch))
        floor_s = write_floor_s(memory.path, batch.num_bytes)
        for end in (*receivers, sender):
            await end.close()
    loop_s, wall_s, receive_s = (statistics.median(figures) for figures in zip(*sent[1:], strict=True))
    return Row(
        carrier,
        tokens=batch.num_tokens,
        ranks=RANKS,
        batch_bytes=batch.num_bytes,
        form_s=statistics.median(sum(slices_s) for slices_s in formed[1:]),
        form_slice_max_s=statistics.median(max(slices_s) for slices_s in formed[1:]),
        loop_s=loop_s,
        wall_s=wall_s,
        receive_s=receive_s,
        write_floor_s=floor_s,
        target=TARGET_S,
        met=loop_s < TARGET_S,
    )


def form(groups: Sequence[Group], step: int) -> tuple[PlannedBatch, list[float]]:
    """A batch, and the seconds of each slice of forming it."""
    sampled: list[SampledGroup] = []
    slices_s = []
    for group in groups:
        began_s = time.perf_counter()
        sampled.append(sample_group(group, oldest_version=0))
        slices_s.append(time.perf_counter() - began_s)
    row_tokens = max(sample.num_tokens for group in sampled for sample in group.samples)
    forming = form_batch(sampled, step=step, trainer_version=0, packing=Packing(row_tokens, RANKS))
    while True:
        began_s = time.perf_counter()
        try:
            next(forming)
        except StopIteration as end:
            batch: PlannedBatch = end.value.batch
            return batch, slices_s
        finally:
            slices_s.append(time.perf_counter() - began_s)


async def send(sender: BatchSender, receivers: Sequence[BatchReceiver], batch: PlannedBatch) -> tuple[float, ...]:
    """Seconds of the loop, until `send` returns, and from there until the last rank has its rows."""
    loop, taken = asyncio.get_running_loop(), LoopTime()
    loop.set_task_factory(watching_task_factory(taken))
    try:
        began_s = time.perf_counter()
        await loop.create_task(sender.send(batch))
    finally:
        loop.set_task_factory(None)
    sent_s = time.perf_counter()
    parts = [await receiver.receive() for receiver in receivers]
    received_s = time.perf_counter()
    assert sum(len(part.token_ids) for part in parts) == batch.num_tokens
    for receiver in receivers:
        await receiver.acknowledge(batch.summary.step)
    return taken.total_s, sent_s - began_s, received_s - sent_s


def open_queue(
    carrier: str, address: str, shared_memory: Path, folder: Path
) -> tuple[BatchSender, list[BatchReceiver]]:
    """Both ends."""
    ranks = [{"rank": rank, "num_ranks": RANKS} for rank in range(RANKS)]
    if carrier == "memory":
        queue = MemoryBatchQueue(num_ranks=RANKS)
        return queue, [queue.receiver(rank) for rank in range(RANKS)]
    if carrier == "files":
        return ChannelBatchSender(address, FileStore(folder), num_ranks=RANKS), [
            ChannelBatchReceiver(address, FileSource(folder), **of) for of in ranks
        ]
    if carrier == "zmq":
        return ChannelBatchSender(address, ValueStore(), num_ranks=RANKS), [
            ChannelBatchReceiver(address, ValueSource(), **of) for of in ranks
        ]
    sender = ChannelBatchSender(address, SharedMemoryStore(shared_memory), num_ranks=RANKS)
    return sender, [ChannelBatchReceiver(address, FileSource(shared_memory, recycled=True), **of) for of in ranks]


def write_floor_s(folder: Path, num_bytes: int) -> float:
    """The best of a few plain writes into a file that was written before."""
    content = np.ones(num_bytes, np.uint8)
    file = os.open(folder / "floor", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, content.data, 0)
        return min(timed(lambda: os.pwrite(file, content.data, 0)) for _ in range(5))
    finally:
        os.close(file)
        (folder / "floor").unlink()


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
