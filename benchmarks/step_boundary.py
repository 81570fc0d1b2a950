"""What a step boundary costs: completions that arrived become a batch for 8 ranks, and a trainer makes tensors of it.

    generator's process      orchestrator (this process)                        trainer's process
    puts experts  ──refs──►  arrive ─► sample ─► form_batch ─► send_batch ────► receive ─► tensors, rank after rank
                             (by value: puts the experts that came along)

64 rollouts of 20 turns, 2.6 million tokens and 1 GB of routed experts, beside 200 tasks of traffic on the loop; also
256 x 20 without experts, and up to 8 GB. The messages of one turn of all rollouts lie in memory, encoded, when the
clock starts, turn after turn: what the kernel's sockets cost is not in it, nor what a generator does in its own
process (a row of its own). The first step warms memory up and is not counted; of the others the median is told, with
the worst lag and memory.

    python benchmarks/step_boundary.py --json
    python benchmarks/step_boundary.py --quick
    python benchmarks/step_boundary.py --case 64x20-1GB-value

`run-64x20-...` is another thing: a whole run's orchestrator (see `step_run.py`), in CPU time.

`boundary` is all that is left once a step's last completion has arrived: sample, form_batch and send_batch. Recording
a turn costs some tens of microseconds whatever its payload, so without experts only the boundary is held against the
write floor; with them `orchestrator` is, which is all of it.

Two floors are measured in the same run: one gathered write of the payload into recycled shared memory, and mapping and
reading it once; `memcpy_s` is one copy of it in warm memory. The idle loop has the same traffic and nothing else to do.
Memory is what a process has above what it had before its first step. By reference, nothing may grow with the payload:
the orchestrator's time is held against that of the same step with an eighth of a GB or less.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import kit  # before NumPy: it sets the number of threads
import msgspec
import numpy as np
import psutil
import step_run
from step_peers import TOP_K, Peer, Trained, experts_of, generator, read_floor_s, refs_of, trainer

from tailrace.batching import FormedBatch, Packing, compute_advantages, sample_group
from tailrace.batching.batches import form_batch
from tailrace.batching.slices import in_turns
from tailrace.generation.rpc.messages import (
    CompletionReply,
    Frames,
    unpack_payloads,
    unpack_replies,
)
from tailrace.lifecycle.event_loop import run_on_event_loop
from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    PayloadChunk,
    PayloadRef,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.replay.loop_load import LagSampler, SampledLag, loop_traffic
from tailrace.replay.memory import PeakMemory, copy_s
from tailrace.transport.batches.channels import ChannelBatchSender
from tailrace.transport.batches.stores import SharedMemoryStore
from tailrace.transport.channels import encode, ipc_address
from tailrace.transport.owned_folders import (
    own_shared_memory,
    own_socket_folder,
    remove_leftovers,
    shared_memory_folder,
)
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.slab_store import SlabPayloadStore

RANKS, TRAFFIC_TASKS, GROUP_SIZE, ROW_TOKENS = 8, 200, 8, 65_536
CONTEXT_TOKENS, COMPLETION_TOKENS = 1016, 1016
FLOOR, LAG_P99_S, LAG_MAX_S, MEMORY_SHARE, GROWTH = 1.5, 0.002, 0.010, 1.3, 1.5
_FLOOR_BYTES = 1 << 30
_GATHERED = 1024
_IDLE_S = 2.0
_MEMORY_NEEDED = 1.5
"""Payloads: the store itself, what libraries and rows take, and some that is not ours to fill."""


@dataclass(frozen=True)
class Case:
    """One load."""

    name: str
    rollouts: int
    turns: int
    layers: int
    """Layers with experts, of which every token has 8 indices of a byte."""
    by_value: bool

    @property
    def expert_bytes(self) -> int:
        """Of a step."""
        return self.rollouts * sum(self.recorded(turn) for turn in range(self.turns)) * self.layers * TOP_K

    @property
    def payload_bytes(self) -> int:
        """Of a step, with 13 bytes of columns for each token."""
        return self.expert_bytes + 13 * self.rollouts * self.turns * (CONTEXT_TOKENS + COMPLETION_TOKENS)

    def recorded(self, turn: int) -> int:
        """Positions that a turn's request forwarded: all that were not, but the last token."""
        return CONTEXT_TOKENS + COMPLETION_TOKENS - (turn == 0)


def _cases() -> dict[str, Case]:
    by_size = {"64MB": 3, "1GB": 48, "2GB": 96, "4GB": 192, "8GB": 384}
    cases = [Case(f"64x20-{size}-reference", 64, 20, layers, False) for size, layers in by_size.items()]
    cases += [Case(f"64x20-{size}-value", 64, 20, by_size[size], True) for size in ("1GB", "4GB")]
    return {case.name: case for case in [*cases, Case("256x20-no-experts", 256, 20, 0, False)]}


CASES = _cases()
RUN_CASES = {"run-64x20-no-experts": False, "run-64x20-1GB-reference": True}
"""Whether there are routed experts."""
QUICK = ("run-64x20-1GB-reference", "64x20-64MB-reference", "64x20-1GB-reference", "64x20-1GB-value")


@dataclass(frozen=True)
class Row:
    """One phase of one case."""

    case: str
    phase: str
    payload_bytes: int
    wall_s: float
    memcpy_s: float
    write_floor_s: float
    read_floor_s: float
    lag_p99_s: float | None = None
    lag_max_s: float | None = None
    idle_lag_max_s: float | None = None
    peak_rss_bytes: int | None = None
    target: str | None = None
    met: bool | None = None


@dataclass(frozen=True)
class Floors:
    """Of a payload's size, in seconds."""

    memcpy_s: float
    write_s: float
    read_s: float


@dataclass
class Step:
    """What one step took."""

    walls_s: dict[str, float] = field(default_factory=dict)
    lag: SampledLag | None = None
    peak_bytes: int = 0
    put_s: float = 0.0
    trained: Trained | None = None

    @property
    def orchestrator_s(self) -> float:
        """Arrival to sent batch."""
        return sum(self.walls_s.values())


def main() -> None:
    options = kit.parse_options(__doc__)
    names = options.choose([*CASES, *RUN_CASES])
    if options.quick and not options.cases:
        names = [name for name in names if name in QUICK]
    remove_leftovers()
    rows: list[Row] = []
    run_rows: list[step_run.RunRow] = []
    for name in names:
        if name in RUN_CASES:
            kit.progress(name)
            steps = 3 if options.quick else 8
            run_rows += run_on_event_loop(step_run.run_case(name, with_experts=RUN_CASES[name], steps=steps))
            continue
        case = CASES[name]
        if not _has_room(case):
            kit.progress(
                f"{name}: left out, it needs {_MEMORY_NEEDED * case.payload_bytes / 1e9:.0f} GB of free memory"
            )
            continue
        kit.progress(name)
        smallest_s = next((row.wall_s for row in rows if row.phase == "orchestrator" and "64MB" in row.case), None)
        rows += run_on_event_loop(run_case(case, steps=2 if options.quick else 4, smallest_s=smallest_s))
    kit.report("Step boundary", [*rows, *run_rows], options)


async def run_case(case: Case, *, steps: int, smallest_s: float | None) -> list[Row]:
    """All of its rows."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(own_shared_memory("benchmark")).path
        address = ipc_address(stack.enter_context(own_socket_folder("benchmark")).path, "batches")
        floors = measure_floors(folder, case.payload_bytes)
        generating = stack.enter_context(Peer(generator, str(folder)))
        sender = ChannelBatchSender(address, SharedMemoryStore(folder), num_ranks=RANKS)
        training = stack.enter_context(Peer(trainer, address, str(folder), RANKS))
        await asyncio.to_thread(training.receive)
        stack.push_async_callback(sender.close)
        orchestrator = Orchestrator(case, folder, sender)
        stack.push_async_callback(orchestrator.close)
        stack.enter_context(hold_old_objects())  # as in a run's orchestrator
        async with loop_traffic(TRAFFIC_TASKS):
            idle = LagSampler()
            async with idle:
                await asyncio.sleep(_IDLE_S)
            done = [await one_step(orchestrator, generating, training, number) for number in range(steps + 1)]
    return list(rows_of(case, done[1:], floors, idle.statistics(), smallest_s))


async def one_step(orchestrator: Orchestrator, generating: Peer, training: Peer, number: int) -> Step:
    """From messages to trained, and everything released."""
    case, step = orchestrator.case, Step()
    refs: list[PayloadRef] = []
    if case.layers and not case.by_value:
        lengths = [case.recorded(turn) for turn in range(case.turns) for _ in range(case.rollouts)]
        refs, step.put_s = refs_of(await asyncio.to_thread(generating.ask, (lengths, case.layers)))
    gc.collect()
    with PeakMemory() as memory:
        await orchestrator.run(step, number, refs)
    step.peak_bytes = memory.peak_bytes - orchestrator.before_bytes
    answer = await asyncio.to_thread(training.ask, number)
    assert isinstance(answer, Trained)
    step.trained = answer
    orchestrator.release()
    return step


class Orchestrator:
    """What the orchestrator does of a step, with the run's own parts."""

    def __init__(self, case: Case, folder: Path, sender: ChannelBatchSender) -> None:
        self.case, self._sender = case, sender
        self._accounts = PayloadAccounts(SlabPayloadStore(folder, writer="orchestrator"))
        random = np.random.default_rng(0)
        self._context = random.integers(32_000, size=CONTEXT_TOKENS, dtype=np.int32)
        self._tokens = [random.integers(32_000, size=COMPLETION_TOKENS, dtype=np.int32) for _ in range(case.rollouts)]
        self._logprobs = -random.random(COMPLETION_TOKENS, dtype=np.float32)
        self._versions = np.zeros(COMPLETION_TOKENS, np.int32)
        self._arrived = [
            experts_of(case.recorded(1), case.layers, seed) for seed in range(case.rollouts if case.by_value else 0)
        ]
        self._groups: list[Group] = []
        with PeakMemory() as memory:
            self.before_bytes = memory.before_bytes

    async def run(self, step: Step, number: int, refs: Sequence[PayloadRef]) -> None:
        """Fill `step`."""
        self._groups = make_groups(self.case, number)
        rollouts = [rollout for group in self._groups for rollout in group.rollouts]
        turns = [
            [self._message(turn, place, refs) for place in range(len(rollouts))] for turn in range(self.case.turns)
        ]
        lag = LagSampler()
        async with lag:
            for messages in turns:
                with timed(step, "arrive"):
                    await self._arrive_all(rollouts, messages)
            formed = await self._form(step, number)
            with timed(step, "send_batch"):
                await self._sender.send(formed.batch)
        step.lag = lag.statistics()

    def release(self) -> None:
        """As when the trainer is done with the step."""
        for group in self._groups:
            for rollout in group.rollouts:
                self._accounts.release(rollout.rollout_id)
        self._groups = []

    async def close(self) -> None:
        """Release what is held."""
        await self._accounts.close()

    def _message(self, turn: int, place: int, refs: Sequence[PayloadRef]) -> tuple[bytes, Frames]:
        """A completion of a turn, as it comes over the socket."""
        case = self.case
        start = max(0, turn * (CONTEXT_TOKENS + COMPLETION_TOKENS) - 1)
        end, frames = start + case.recorded(turn), []
        chunks: tuple[PayloadChunk, ...] = ()
        if case.by_value:
            experts = self._arrived[place][: end - start]
            chunks = (PayloadChunk(start, end, PayloadRef("memory:1", "uint8", experts.shape)),)
            frames = [experts.reshape(-1).data]
        elif refs:
            chunks = (PayloadChunk(start, end, refs[turn * case.rollouts + place]),)
        completion = Completion(
            self._tokens[place], self._logprobs, self._versions, FinishReason.STOP, routed_experts=chunks
        )
        return encode(CompletionReply(call_id=place, completion=completion, payload_frames=len(frames))), frames

    async def _arrive_all(self, rollouts: Sequence[Rollout], messages: Sequence[tuple[bytes, Frames]]) -> None:
        """One after the other, as a socket is read; each goes on in its rollout's own task."""
        async with asyncio.TaskGroup() as tasks:
            for rollout, message in zip(rollouts, messages, strict=True):
                tasks.create_task(self._arrive(rollout, message))
                await asyncio.sleep(0)

    async def _arrive(self, rollout: Rollout, message: tuple[bytes, Frames]) -> None:
        """What `GeneratorClient` and a rollout's policy do with a completion."""
        (reply,), frames = unpack_replies(message[0]), message[1]
        assert isinstance(reply, CompletionReply)
        completion = reply.completion
        if reply.payload_frames:
            ((chunk, array),) = unpack_payloads(reply, frames)
            ref = await self._accounts.put(rollout.rollout_id, array)
            completion = replace(completion, routed_experts=(msgspec.structs.replace(chunk, ref=ref),))
        else:
            self._accounts.record(rollout.rollout_id, completion.routed_experts)
        (branch,) = rollout.branches
        branch.extend_context(self._context)
        branch.extend_completion(completion)

    async def _form(self, step: Step, number: int) -> FormedBatch:
        with timed(step, "sample"):
            sampled = []
            for group in self._groups:
                compute_advantages(group, "mean_std")
                sampled.append(sample_group(group, oldest_version=-4))
                await asyncio.sleep(0)
        with timed(step, "form_batch"):
            packing = Packing(ROW_TOKENS, num_ranks=RANKS)
            return await in_turns(form_batch(sampled, step=number + 1, trainer_version=0, packing=packing))


def make_groups(case: Case, number: int) -> list[Group]:
    """Of rollouts that have no token yet."""
    groups = []
    for first in range(0, case.rollouts, GROUP_SIZE):
        group_id = GroupId(f"{number}/{first}")
        task = Task(TaskId(f"task/{first}"), "synthetic", first, {})
        members = [
            Rollout(RolloutId(f"{group_id}.{place}"), group_id, task, SamplingParams(), [Branch()], turns=case.turns)
            for place in range(GROUP_SIZE)
        ]
        for place, member in enumerate(members):
            member.reward = Reward(float(place % 2))
        groups.append(Group(group_id, task, members))
    return groups


def measure_floors(folder: Path, num_bytes: int) -> Floors:
    """Measured on a GiB at most, and scaled: it is memory that other cases need."""
    size = min(num_bytes, _FLOOR_BYTES) // 4096 * 4096
    scale, path = num_bytes / size, folder / "floor"
    piece = np.random.default_rng(0).integers(256, size=64 << 20, dtype=np.uint8)
    pieces = [piece[start : start + (1 << 20)].data for start in range(0, len(piece), 1 << 20)]
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        writes = [_gathered_write_s(file.fileno(), pieces, size) for _ in range(3)]
    reads = [read_floor_s(path, size) for _ in range(3)]
    path.unlink()
    return Floors(copy_s(num_bytes), min(writes[1:]) * scale, min(reads) * scale)


def _gathered_write_s(file: int, pieces: Sequence[memoryview], size: int) -> float:
    os.lseek(file, 0, os.SEEK_SET)
    started_s, left = time.perf_counter(), size
    while left > 0:
        left -= os.writev(file, [*pieces][: min(_GATHERED, -(-left // len(pieces[0])))])
    return time.perf_counter() - started_s


@contextmanager
def timed(step: Step, name: str) -> Iterator[None]:
    """Add the block's wall time to the phase."""
    started_s = time.perf_counter()
    yield
    step.walls_s[name] = step.walls_s.get(name, 0.0) + time.perf_counter() - started_s


def rows_of(
    case: Case, steps: Sequence[Step], floors: Floors, idle: SampledLag, smallest_s: float | None
) -> Iterator[Row]:
    """The phases, then the sums that have targets."""
    common = (floors.memcpy_s, floors.write_s, floors.read_s)

    def row(phase: str, wall_s: float, **more: object) -> Row:
        return Row(case.name, phase, case.payload_bytes, wall_s, *common, **more)  # type: ignore[arg-type]

    trained = [step.trained for step in steps if step.trained is not None]
    if any(step.put_s for step in steps):
        yield row("generator_put", statistics.median(step.put_s for step in steps))
    for name in steps[0].walls_s:
        yield row(name, statistics.median(step.walls_s[name] for step in steps))
    boundary_s = statistics.median(step.orchestrator_s - step.walls_s["arrive"] for step in steps)
    goal = {} if case.layers else {"target": "1.5 x the write floor", "met": boundary_s <= FLOOR * floors.write_s}
    yield row("boundary", boundary_s, **goal)
    wall_s = statistics.median(step.orchestrator_s for step in steps)
    target, limit_s = _orchestrator_target(case, floors, smallest_s)
    yield row("orchestrator", wall_s, target=target, met=None if limit_s is None else wall_s <= limit_s)
    lags = [step.lag for step in steps if step.lag is not None]
    p99_s, max_s = max(lag.p99_s for lag in lags), max(lag.max_s for lag in lags)
    lag = {"lag_p99_s": p99_s, "lag_max_s": max_s, "idle_lag_max_s": idle.max_s}
    yield row("lag_p99", wall_s, **lag, target="2 ms", met=p99_s < LAG_P99_S)
    allowed_s = max(LAG_MAX_S, 3 * idle.max_s)
    yield row("lag_max", wall_s, **lag, target="10 ms or 3 x the idle loop's", met=max_s < allowed_s)
    peak = max(step.peak_bytes for step in steps)
    yield row("orchestrator_rss", wall_s, peak_rss_bytes=peak, **_memory_target(case, peak))
    for name, of in (("receive", "open_s"), ("read_experts", "experts_s"), ("micro_batches", "prepare_s")):
        yield row(name, statistics.median(getattr(one, of) for one in trained))
    wall_s = statistics.median(one.wall_s for one in trained)
    goal = {"target": "1.5 x the read floor", "met": wall_s <= FLOOR * floors.read_s} if case.layers > 3 else {}
    yield row("trainer", wall_s, **goal)
    peak = max(one.peak_bytes for one in trained)
    yield row("trainer_rss", wall_s, peak_rss_bytes=peak, **_memory_target(case, peak))


def _orchestrator_target(case: Case, floors: Floors, smallest_s: float | None) -> tuple[str | None, float | None]:
    if not case.layers:
        return None, None
    if case.by_value:
        return "1.5 x the write floor", FLOOR * floors.write_s
    if smallest_s is None:
        return None, None
    return f"{GROWTH} x that of 64 MB", GROWTH * smallest_s


def _memory_target(case: Case, peak: int) -> dict[str, object]:
    if case.payload_bytes < 1e9:  # what libraries take when they are first used would be all of it
        return {}
    return {"target": "1.3 x the payload", "met": peak <= MEMORY_SHARE * case.payload_bytes}


def _has_room(case: Case) -> bool:
    free = min(psutil.virtual_memory().available, shutil.disk_usage(shared_memory_folder()).free)
    return free > _MEMORY_NEEDED * case.payload_bytes


if __name__ == "__main__":
    main()
