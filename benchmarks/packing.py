"""Packing: scored groups to a batch that lies in shared memory, row by row and rank by rank.

    pack   2,000 samples of 200 to 8,000 tokens, 8 x 8 a step, rows of 8,192: sampled, planned and written
    plan   one plan of 8,192 samples on 64 ranks, nothing written

CPU time is all that the process used: planning, laying out, and moving every byte once, from the branches into recycled
shared memory. `padding` is with rows padded to multiples of an eighth of a row, `one_shape_padding` where every row is
padded to the whole; `ffd_padding` is first-fit decreasing into rows of one shape, which knows of no ranks.
`rank_imbalance` is how much longer the busiest rank takes than the mean, by the cost model of `Packing`; the mean over
the steps. Left out: the trainer's side, and routed experts, which `benchmarks/step_boundary.py` measures.

    python benchmarks/packing.py [--json] [--quick] [--case pack]
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.batching import Packing, compute_advantages, form_batch, sample_group
from tailrace.batching.packing import RowPlan, plan_rows, sample_costs
from tailrace.batching.slices import drained
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.transport.batches.stores import SharedMemoryStore
from tailrace.transport.owned_folders import shared_memory_folder

ROW_TOKENS = 8192
SHORTEST, LONGEST = 200, 8000
NUM_SAMPLES, GROUPS, GROUP_SIZE = 2000, 8, 8
IN_FLIGHT = 3
"""Batches that lie in shared memory at once, as in a run."""
TARGET_TOKENS_PER_CPU_S = 50e6
TARGET_PLAN_S = 0.05
DISTRIBUTIONS = ("uniform", "lognormal")


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one case."""

    case: str
    distribution: str
    ranks: int
    tokens_per_cpu_s: float | None
    padding: float
    one_shape_padding: float
    ffd_padding: float | None
    rank_imbalance: float
    plan_s: float
    target: float
    met: bool


def main() -> None:
    """Run the chosen cases."""
    options = kit.parse_options(__doc__)
    rows: list[Row] = []
    for case in options.choose(["pack", "plan"]):
        for distribution in DISTRIBUTIONS:
            for ranks in (1, 4) if case == "pack" else (64,):
                kit.progress(f"{case}: {distribution} on {ranks} ranks ...")
                rows.append((pack if case == "pack" else plan)(distribution, ranks, options))
    kit.report("Packing", rows, options)


def pack(distribution: str, ranks: int, options: kit.Options) -> Row:
    """All steps of the 2,000 samples, again and again; the median round of tokens per CPU-second."""
    lengths = draw_lengths(distribution, NUM_SAMPLES)
    steps = [make_groups(lengths[first : first + GROUPS * GROUP_SIZE]) for first in step_starts()]
    packing = Packing(ROW_TOKENS, ranks)
    with tempfile.TemporaryDirectory(prefix="tailrace-packing-", dir=shared_memory_folder()) as folder:
        store = SharedMemoryStore(Path(folder))
        rates = [pack_all(steps, packing, store, round_) for round_ in range(rounds(options))]
        store.close()
    planned = [(planned_rows(of_step(lengths, first), packing), first) for first in step_starts()]
    plain = [planned_rows(of_step(lengths, first), Packing(ROW_TOKENS, ranks, num_shapes=1)) for first in step_starts()]
    ffd = [first_fit_decreasing(of_step(lengths, first)) for first in step_starts()]
    tokens_per_cpu_s = statistics.median(rates[1:])  # the first round writes into fresh memory
    one_shape_padding, ffd_padding = float(np.mean([plan.padding for plan in plain])), float(np.mean(ffd))
    return Row(
        "pack",
        distribution,
        ranks,
        tokens_per_cpu_s=tokens_per_cpu_s,
        padding=float(np.mean([plan.padding for plan, _ in planned])),
        one_shape_padding=one_shape_padding,
        ffd_padding=ffd_padding,
        rank_imbalance=float(np.mean([imbalance(plan, of_step(lengths, first)) for plan, first in planned])),
        plan_s=typical_plan_s(of_step(lengths, 0), packing, options),
        target=TARGET_TOKENS_PER_CPU_S,
        met=is_met(tokens_per_cpu_s, one_shape_padding, ffd_padding),
    )


def is_met(tokens_per_cpu_s: float, one_shape_padding: float, ffd_padding: float) -> bool:
    """Both targets of `pack`: first-fit decreasing has rows of one shape as well."""
    return bool(tokens_per_cpu_s >= TARGET_TOKENS_PER_CPU_S and one_shape_padding <= ffd_padding)


def plan(distribution: str, ranks: int, options: kit.Options) -> Row:
    """One large plan."""
    lengths, packing = draw_lengths(distribution, 8192), Packing(ROW_TOKENS, ranks)
    planned, plain = planned_rows(lengths, packing), planned_rows(lengths, Packing(ROW_TOKENS, ranks, num_shapes=1))
    plan_s = typical_plan_s(lengths, packing, options)
    return Row(
        "plan",
        distribution,
        ranks,
        tokens_per_cpu_s=int(lengths.sum()) / plan_s,
        padding=planned.padding,
        one_shape_padding=plain.padding,
        ffd_padding=None if options.quick else first_fit_decreasing(lengths),
        rank_imbalance=imbalance(planned, lengths),
        plan_s=plan_s,
        target=TARGET_PLAN_S,
        met=plan_s < TARGET_PLAN_S,
    )


def imbalance(plan: RowPlan, lengths: NDArray[np.int32]) -> float:
    """How much longer the busiest rank takes than the mean of them, as a share."""
    ends = plan.row_offsets[plan.rank_offsets]
    costs = np.add.reduceat(sample_costs(lengths)[plan.order], ends[:-1])
    return float(costs.max() / costs.mean()) - 1.0


def pack_all(steps: Sequence[list[Group]], packing: Packing, store: SharedMemoryStore, round_: int) -> float:
    """Tokens per CPU-second from scored groups to written batches."""
    began_s, tokens = time.process_time(), 0
    for number, groups in enumerate(steps):
        sampled = [sample_group(group, oldest_version=0) for group in groups]
        batch = drained(form_batch(sampled, step=number + 1, trainer_version=0, packing=packing)).batch
        sequence = round_ * len(steps) + number + 1
        store.write(batch, sequence)
        if sequence > IN_FLIGHT:
            store.release(sequence - IN_FLIGHT)
        tokens += batch.num_tokens
    return tokens / (time.process_time() - began_s)


def planned_rows(lengths: NDArray[np.int32], packing: Packing) -> RowPlan:
    return drained(plan_rows(lengths, packing))


def rounds(options: kit.Options) -> int:
    """How often everything is done."""
    return 3 if options.quick else 20


def typical_plan_s(lengths: NDArray[np.int32], packing: Packing, options: kit.Options) -> float:
    """CPU seconds, median."""
    return statistics.median(timed_plan(lengths, packing) for _ in range(rounds(options)))


def timed_plan(lengths: NDArray[np.int32], packing: Packing) -> float:
    """CPU seconds."""
    began_s = time.process_time()
    planned_rows(lengths, packing)
    return time.process_time() - began_s


def step_starts() -> range:
    """Of each whole step's samples."""
    return range(0, NUM_SAMPLES - GROUPS * GROUP_SIZE + 1, GROUPS * GROUP_SIZE)


def of_step(lengths: NDArray[np.int32], first: int) -> NDArray[np.int32]:
    """[samples of a step]."""
    return lengths[first : first + GROUPS * GROUP_SIZE]


def draw_lengths(distribution: str, count: int) -> NDArray[np.int32]:
    """[count], in tokens; the same ones every time."""
    random = np.random.default_rng(0)
    if distribution == "uniform":
        return random.integers(SHORTEST, LONGEST + 1, count, dtype=np.int32)
    return np.clip(random.lognormal(np.log(1500), 0.9, count), SHORTEST, LONGEST).astype(np.int32)


def make_groups(lengths: NDArray[np.int32]) -> list[Group]:
    """Finished, scored groups whose rollouts have so many tokens, a quarter of them prompt."""
    groups = []
    for first in range(0, len(lengths), GROUP_SIZE):
        group_id = GroupId(f"group-{first}")
        task = Task(TaskId(f"packing/{first}"), "packing", first, {})
        rollouts = [
            make_rollout(task, group_id, number, int(length))
            for number, length in enumerate(lengths[first : first + GROUP_SIZE])
        ]
        group = Group(group_id=group_id, task=task, rollouts=rollouts)
        compute_advantages(group, "mean")
        groups.append(group)
    return groups


def make_rollout(task: Task, group_id: GroupId, number: int, length: int) -> Rollout:
    """One branch of one turn."""
    random, sampled = np.random.default_rng(length), length - length // 4
    branch = Branch()
    branch.extend_context(random.integers(0, 32_000, length // 4, dtype=np.int32))
    branch.extend_completion(
        Completion(
            token_ids=random.integers(0, 32_000, sampled, dtype=np.int32),
            logprobs=-random.random(sampled, dtype=np.float32),
            policy_versions=np.zeros(sampled, np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    return Rollout(
        rollout_id=RolloutId(f"{group_id}.{number}"),
        group_id=group_id,
        task=task,
        sampling=SamplingParams(max_tokens=LONGEST),
        branches=[branch],
        reward=Reward(float(number % 2)),
    )


def first_fit_decreasing(lengths: NDArray[np.int32]) -> float:
    """Its padding, in rows of one shape."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        for row, free in enumerate(room):
            if free >= length:
                room[row] -= length
                break
        else:
            room.append(ROW_TOKENS - length)
    return 1.0 - int(lengths.sum()) / (len(room) * ROW_TOKENS)


if __name__ == "__main__":
    main()
