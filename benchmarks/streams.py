"""Training samples from one process to another through Redis: how many a second, at what cost, beside other ways.

    redis           batches of samples, as a run sends them to its own trainer (transport.batches = redis)
    feed            samples as they are ready, as a run hands them to a trainer that is not ours (trainer.feed = stream)
    shared_memory   the same batches, by the default carrier
    pickled, json   one entry for each sample, of lists of numbers, read one at a time, as PipelineRL does
    server-redis    what Redis itself does with values as large as the parts that batches are cut into (SET, then GET)
    server-feed     the same with entries as large as the documents of samples (XADD, then XRANGE)

The receiver is a process of its own, and copies nothing but what its way makes it copy. `sender_us` is the sender's CPU
time for a sample, `lag_max_s` the longest that its event loop did not turn. The server's own rates are of
redis-benchmark, each way with the number of clients that is fastest. Targets, for `redis` and `feed`: five times the
samples of `pickled`, less than 100 µs of the sender for each, and 60 % of the server's own rate with what is as large.

    python benchmarks/streams.py [--json] [--quick] [--case redis]
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import json
import pickle
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.batching.packing import Packing, plan_rows
from tailrace.batching.slices import drained
from tailrace.lifecycle.event_loop import run_on_event_loop
from tailrace.records import (
    BatchSummary,
    Branch,
    Completion,
    FeedSample,
    FinishReason,
    GroupId,
    PlannedBatch,
    RolloutId,
    SamplingParams,
    StepDone,
    StopRequested,
    StreamedSample,
    TaskId,
    TrainingBegan,
    TrainingSample,
    sample_of,
)
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.queue import BatchReceiver, BatchSender
from tailrace.transport.batches.stores import FileSource, SharedMemoryStore, ValueSource, ValueStore
from tailrace.transport.channels import ipc_address
from tailrace.transport.owned_folders import own_shared_memory, own_socket_folder
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.entries import PART_BYTES
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver
from tailrace.transport.redis.sample_sender import RedisSampleSender
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.redis.streams import Origin
from tailrace.transport.samples.codec import encode_samples

OURS = ("redis", "feed")
CASES = (*OURS, "shared_memory", "pickled", "json", *(f"server-{one}" for one in OURS))
SAMPLES = 256
"""In a batch."""
TOKENS = 1000
"""In a sample."""
WARM_UP = 4
"""Batches that are not measured."""
DOCUMENT = 16
"""Samples of a document of `feed`, where its size is asked for: it holds as many as are ready, up to 33 of these."""
CLIENTS = (1, 4, 50)
"""Of redis-benchmark, which has 50 by default: with large values fewer are faster."""
STEP = 64
"""Samples that the receiver of `feed` takes for a step."""
MOST_US = 100.0
LEAST_TIMES = 5.0
LEAST_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Row:
    """One way."""

    case: str
    samples: int
    tokens_each: int
    bytes_each: int
    samples_per_s: float
    sender_us: float
    receiver_us: float
    lag_max_s: float
    times_pickled: float | None = None
    share_of_server: float | None = None
    target: str = ""
    met: bool | None = None


def main() -> None:
    """Run the chosen cases, or be the receiver of one."""
    parser = kit.common_parser(__doc__)
    parser.add_argument("--receive", help="be the other process: its case, address and the like, as JSON")
    arguments = parser.parse_args()
    if arguments.receive is not None:
        receive(json.loads(arguments.receive))
        return
    options = kit.common_options(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            for case in options.choose(CASES):
                kit.progress(f"{case} ...")
                rows.append(measure(case, server, batches=60 if options.quick else 240))
        finally:
            server.kill()
    kit.report("Samples through Redis", judged(rows), options)


def measure(case: str, server: RedisServer, *, batches: int) -> Row:
    """One way, alone."""
    if case.startswith("server-"):
        return of_server(case, server, batches)
    if case in ("pickled", "json"):
        return run_on_event_loop(send_entries(case, server, max(1, batches // 16)))
    if case == "feed":
        return run_on_event_loop(send_samples(server, batches // 4))
    return run_on_event_loop(send_batches(case, server, batches))


async def send_batches(case: str, server: RedisServer, batches: int) -> Row:
    """As a run does; the first are warm-up."""
    epoch = uuid.uuid4().hex
    planned = [plan(step) for step in range(1, 4)]
    with own_shared_memory(epoch) as memory, own_socket_folder(epoch) as sockets:
        about = {
            **{"case": case, "url": server.url, "epoch": epoch, "memory": str(memory.path)},
            "batches": batches + WARM_UP,
            "address": ipc_address(sockets.path, "batches"),
        }
        async with receiver_of(about) as received:
            sender = open_sender(about)
            for step in range(1, WARM_UP + 1):
                await sender.send(numbered(planned[0], step))
            async with measured() as figures:
                for step in range(WARM_UP + 1, batches + WARM_UP + 1):
                    await sender.send(numbered(planned[step % 3], step))
                other_cpu_s = await received()
            await sender.close()
    return row_of(case, batches * SAMPLES, planned[0].num_bytes // SAMPLES, figures, other_cpu_s)


async def send_samples(server: RedisServer, batches: int) -> Row:
    """By groups of 8, as many at a time as a run has credits for; the first are warm-up."""
    about = {"case": "feed", "url": server.url, "epoch": uuid.uuid4().hex, "samples": (batches + WARM_UP) * SAMPLES}
    content, warm_up = plan(1).samples, WARM_UP * SAMPLES
    async with receiver_of(about) as received:
        sender = RedisSampleSender(place(about))
        credits = asyncio.Semaphore(2 * SAMPLES)
        told = asyncio.create_task(take_reports(sender, credits))
        await offer(sender, content, range(warm_up), credits)
        async with measured() as figures:
            await offer(sender, content, range(warm_up, about["samples"]), credits)
            other_cpu_s = await received()
        await sender.close()
        await told
    together = [handed(content, number) for number in range(DOCUMENT)]
    bytes_each = len(encode_samples(together, run="benchmark", epoch=about["epoch"])) // len(together)
    return row_of("feed", batches * SAMPLES, bytes_each, figures, other_cpu_s)


async def offer(
    sender: RedisSampleSender, content: Sequence[TrainingSample], numbers: range, credits: asyncio.Semaphore
) -> None:
    """Samples of these numbers."""
    for first in range(numbers.start, numbers.stop, 8):
        for _ in range(8):
            await credits.acquire()
        await sender.offer([handed(content, number) for number in range(first, first + 8)])


async def take_reports(sender: RedisSampleSender, credits: asyncio.Semaphore) -> None:
    """Steps give credits back."""
    async for report in sender.reports():
        if isinstance(report, StepDone):
            await sender.release(report.sample_ids)
            for _ in report.sample_ids:
                credits.release()


def handed(content: Sequence[TrainingSample], number: int) -> FeedSample:
    """One of so many samples, under a name of its own."""
    sample = content[number % len(content)]
    return FeedSample(
        sample_id=sample_of(RolloutId(f"task/{number}"), 0),
        sample=sample,
        task_id=TaskId("task"),
        reward=1.0,
        sampling=SamplingParams(max_tokens=TOKENS),
        trainer_version=0,
        group_rollouts=8,
    )


async def send_entries(case: str, server: RedisServer, batches: int) -> Row:
    """One entry for each sample, written on the event loop; the first are warm-up, and were read before it counts."""
    import redis

    warm_up = WARM_UP * SAMPLES
    about = {
        **{"case": case, "url": server.url, "key": uuid.uuid4().hex},
        **{"entries": warm_up + batches * SAMPLES, "warm_up": warm_up},
    }
    encode = encoder(case)
    samples = [lists_of(sample) for sample in plan(1).samples]
    client = redis.Redis.from_url(server.url)

    async def add(numbers: range) -> int:
        for number in numbers:
            data = encode(samples[number % SAMPLES])
            client.xadd(about["key"], {"index": number, "data": data}, maxlen=1_000_000, approximate=True)
            await asyncio.sleep(0)
        return len(data)

    async with receiver_of(about) as received:
        await add(range(warm_up))
        warm_cpu_s = await received()
        async with measured() as figures:
            bytes_each = await add(range(warm_up, about["entries"]))
            other_cpu_s = await received() - warm_cpu_s
    return row_of(case, batches * SAMPLES, bytes_each, figures, other_cpu_s)


def receive(about: dict[str, Any]) -> None:
    """The other process: takes all, and says when it has, and what its CPU time was."""
    if "entries" in about:
        read_entries(about)
        return
    print("ready", flush=True)
    if "samples" in about:
        read_samples(about)
    else:
        run_on_event_loop(read_batches(about))


def read_entries(about: dict[str, Any]) -> None:
    """One at a time; tells its CPU seconds so far after the warm-up and at the end."""
    import redis

    client, last, decode = redis.Redis.from_url(about["url"]), b"0", decoder(about["case"])
    client.ping()
    print("ready", flush=True)
    for number in range(about["entries"]):
        while not (response := client.xread({about["key"]: last}, count=1, block=100)):
            pass
        last, entry = response[0][1][0]
        assert int(entry[b"index"]) == number
        assert len(decode(entry[b"data"])["input_ids"]) == TOKENS
        if number + 1 in (about["warm_up"], about["entries"]):
            print(time.process_time(), flush=True)


def read_samples(about: dict[str, Any]) -> None:
    """As a trainer outside does, which tells of each step; tells its CPU seconds after the warm-up."""
    end = RedisSampleReceiver(about["url"], "benchmark", "rank")
    end.report(TrainingBegan(consumer="rank", step=0, version=0))
    began_s = 0.0
    for step in range(1, about["samples"] // STEP + 1):
        samples: list[StreamedSample] = []
        while len(samples) < STEP:
            pulled = end.pull(STEP - len(samples))
            assert not isinstance(pulled, StopRequested)
            samples += pulled
        assert {len(sample.token_ids) for sample in samples} == {TOKENS}
        ids = tuple(sample.sample_id for sample in samples)
        end.report(StepDone(consumer="rank", step=step, version=step, sample_ids=ids))
        if step == WARM_UP * SAMPLES // STEP:
            began_s = time.process_time()
    print(time.process_time() - began_s, flush=True)
    end.leave()


async def read_batches(about: dict[str, Any]) -> None:
    """As a rank of the trainer does; tells its CPU seconds after the warm-up."""
    receiver, began_s = open_receiver(about), 0.0
    for step in range(1, about["batches"] + 1):
        batch = await receiver.receive()
        assert len(batch.token_ids) == SAMPLES * TOKENS
        await receiver.acknowledge(step)
        if step == WARM_UP:
            began_s = time.process_time()
    print(time.process_time() - began_s, flush=True)
    await asyncio.sleep(0.5)  # the last acknowledgement is on its way, and the sender closes first
    await receiver.close()


def of_server(case: str, server: RedisServer, batches: int) -> Row:
    """What is as large as that way's own, each written once and read once, by the clients of redis-benchmark."""
    bytes_each = plan(1).num_bytes // SAMPLES
    if case == "server-redis":
        num_bytes, write, read = PART_BYTES, ("SET", "part"), ("GET", "part")
    else:
        num_bytes = DOCUMENT * bytes_each
        write = ("XADD", "entries", "MAXLEN", "~", "100", "*", "data")
        read = ("XRANGE", "entries", "-", "+", "COUNT", "1")
    each = num_bytes / bytes_each
    count = int(batches * SAMPLES / 4 / each)
    written_per_s = max(server_rate(server, count, clients, *write, value="x" * num_bytes) for clients in CLIENTS)
    read_per_s = max(server_rate(server, count, clients, *read) for clients in CLIENTS)
    samples_per_s = each / (1 / written_per_s + 1 / read_per_s)
    return Row(case, int(count * each), TOKENS, bytes_each, samples_per_s, 0.0, 0.0, 0.0)


def server_rate(server: RedisServer, count: int, clients: int, *command: str, value: str | None = None) -> float:
    """How often a second Redis does this, with a value behind it or none."""
    host, _, port = server.url.rpartition("@")[2].removesuffix("/0").partition(":")
    password = server.url.partition("//:")[2].partition("@")[0]
    options = ["-n", str(count), "-c", str(clients), "--csv", *([] if value is None else ["-x"])]
    told = subprocess.run(
        ["redis-benchmark", "-h", host, "-p", port, "-a", password, *options, *command],
        check=True,
        capture_output=True,
        text=True,
        input=value,
    )
    return float(told.stdout.splitlines()[-1].replace('"', "").rsplit(",", 7)[1])


def judged(rows: Sequence[Row]) -> list[Row]:
    """With what they are beside each other; where `pickled` or its own `server-` did not run a way is not judged."""
    rates = {row.case: row.samples_per_s for row in rows}
    judged_rows = []
    for row in rows:
        if row.case not in OURS:
            judged_rows.append(row)
            continue
        times = row.samples_per_s / rates["pickled"] if "pickled" in rates else None
        own = rates.get(f"server-{row.case}")
        share = None if own is None else row.samples_per_s / own
        met = row.sender_us < MOST_US and times >= LEAST_TIMES and share >= LEAST_SHARE if times and share else None
        judged_rows.append(
            replace(
                row,
                times_pickled=times,
                share_of_server=share,
                target=f"{LEAST_TIMES:g} x pickled, {MOST_US:g} us, {LEAST_SHARE:g} of server",
                met=met,
            )
        )
    return judged_rows


@dataclass(slots=True)
class Figures:
    """Of the sender."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    lag_max_s: float = 0.0


@asynccontextmanager
async def measured() -> AsyncIterator[Figures]:
    """Wall and CPU time of what is done within, and how long the event loop did not turn at most."""
    figures = Figures()
    ticking = asyncio.create_task(_tick(figures))
    began_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        yield figures
    finally:
        figures.wall_s, figures.cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        ticking.cancel()


async def _tick(figures: Figures) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(0.002)
        figures.lag_max_s = max(figures.lag_max_s, time.perf_counter() - before_s - 0.002)


@asynccontextmanager
async def receiver_of(about: dict[str, Any]) -> AsyncIterator[Callable[[], Any]]:
    """The other process; what is yielded waits until it has all, and returns its CPU seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--receive", json.dumps(about)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    out = process.stdout
    assert (await out.readline()).strip() == b"ready"

    async def received() -> float:
        return float(await out.readline())

    try:
        yield received
    finally:
        await process.wait()


def open_sender(about: dict[str, Any]) -> BatchSender:
    """Of batches."""
    if about["case"] == "shared_memory":
        return ChannelBatchSender(about["address"], SharedMemoryStore(Path(about["memory"])))
    redis = place(about)
    return ChannelBatchSender(redis.address("batches"), ValueStore(), open_channel=redis.open_keeping_channel)


def open_receiver(about: dict[str, Any]) -> BatchReceiver:
    """The other end."""
    if about["case"] == "shared_memory":
        return ChannelBatchReceiver(about["address"], FileSource(Path(about["memory"]), recycled=True))
    redis = place(about)
    return ChannelBatchReceiver(redis.address("batches"), ValueSource(), open_channel=redis.open_channel)


def place(about: dict[str, Any]) -> RedisPlace:
    """Of this measurement alone."""
    return RedisPlace(about["url"], Origin("benchmark", about["epoch"]))


def encoder(case: str) -> Callable[[object], bytes]:
    """Of one sample."""
    return pickle.dumps if case == "pickled" else lambda value: json.dumps(value).encode()


def decoder(case: str) -> Callable[[bytes], Any]:
    """Its inverse."""
    return pickle.loads if case == "pickled" else json.loads


def row_of(case: str, samples: int, bytes_each: int, figures: Figures, other_cpu_s: float) -> Row:
    """Figures by sample."""
    return Row(
        case,
        samples,
        TOKENS,
        bytes_each,
        samples_per_s=samples / figures.wall_s,
        sender_us=figures.cpu_s / samples * 1e6,
        receiver_us=other_cpu_s / samples * 1e6,
        lag_max_s=figures.lag_max_s,
    )


def numbered(batch: PlannedBatch, step: int) -> PlannedBatch:
    """The same rows as the batch of another step."""
    import msgspec

    return replace(batch, summary=msgspec.structs.replace(batch.summary, step=step))


def plan(seed: int) -> PlannedBatch:
    """A batch of samples of one length, one row each."""
    random = np.random.default_rng(seed)
    make = partial(make_sample, random)
    samples = [make(number) for number in range(SAMPLES)]
    lengths = [TOKENS] * SAMPLES
    rows = drained(plan_rows(lengths, Packing(TOKENS, 1, num_shapes=1)))
    return PlannedBatch(
        summary=BatchSummary(
            step=seed,
            trainer_version=0,
            num_samples=SAMPLES,
            num_rollouts=SAMPLES,
            num_tokens=SAMPLES * TOKENS,
            loss_tokens=SAMPLES * TOKENS,
            masked_tokens=0,
            num_rows=rows.num_rows,
            row_tokens=TOKENS,
            staleness_mean=0.0,
            staleness_max=0,
            padding=0.0,
        ),
        samples=[samples[number] for number in rows.order.tolist()],
        lengths=np.asarray(lengths, np.int32)[rows.order],
        row_offsets=rows.row_offsets,
        rank_offsets=rows.rank_offsets,
        num_support_ids=0,
    )


def make_sample(random: np.random.Generator, number: int) -> TrainingSample:
    """A prompt, and nine times as many sampled tokens."""
    branch, prompt = Branch(), TOKENS // 10
    branch.extend_context(random.integers(0, 50_000, prompt, dtype=np.int32))
    branch.extend_completion(
        Completion(
            token_ids=random.integers(0, 50_000, TOKENS - prompt, dtype=np.int32),
            logprobs=random.standard_normal(TOKENS - prompt, dtype=np.float32),
            policy_versions=np.zeros(TOKENS - prompt, np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    return TrainingSample(
        rollout_id=RolloutId(f"g{number // 8}.{number % 8}"),
        group_id=GroupId(f"g{number // 8}"),
        temperature=1.0,
        branch=branch,
        advantages=float(number % 3 - 1),
        oldest_version=0,
        branch_index=0,
        environment="sums",
    )


def lists_of(sample: TrainingSample) -> dict[str, object]:
    """The same sample as lists of numbers, which are there already."""
    branch = sample.branch
    return {
        "input_ids": branch.token_ids.tolist(),
        "logprobs": branch.logprobs.tolist(),
        "labels": np.where(branch.loss_mask, branch.token_ids, -100).tolist(),
        "advantages": [sample.advantages] * TOKENS,
        "group_id": sample.group_id,
        "model_version": 0,
    }


if __name__ == "__main__":
    main()
