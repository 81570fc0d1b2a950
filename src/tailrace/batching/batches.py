"""Samples to one batch: the plan of its rows and ranks, and its summary. No token is looked at, let alone copied."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.batching.packing import Packing, RowPlan, plan_rows
from tailrace.batching.samples import SampledGroup
from tailrace.records import BatchSummary, Int32Array, PlannedBatch, TrainingSample
from tailrace.tracing.phases import phase

MEASURED_AT_ONCE = 512
"""Samples that are counted in one slice: less than a millisecond."""


@dataclass(frozen=True, slots=True, eq=False)
class FormedBatch:
    """A batch, and the groups it was formed of (for the ledger and for people)."""

    batch: PlannedBatch
    groups: list[SampledGroup]


def form_batch(
    groups: Sequence[SampledGroup], *, step: int, trainer_version: int, packing: Packing
) -> Generator[None, None, FormedBatch]:
    """Lay the samples of `groups` in rows, and the rows on ranks; yields now and then.

    `trainer_version` is the highest version that the trainer can have at `step`.
    """
    samples = [sample for group in groups for sample in group.samples]
    with phase("plan_rows"):
        measured = yield from _measure(samples, trainer_version)
        plan = yield from plan_rows(measured.lengths, packing)
    is_large = len(samples) > MEASURED_AT_ONCE
    if is_large:
        yield
    summary = _summary(groups, plan, measured, step=step, trainer_version=trainer_version, packing=packing)
    if is_large:
        yield
    batch = PlannedBatch(
        summary=summary,
        samples=[samples[index] for index in plan.order.tolist()],
        lengths=measured.lengths[plan.order],
        row_offsets=plan.row_offsets,
        rank_offsets=plan.rank_offsets,
    )
    return FormedBatch(batch, list(groups))


@dataclass(slots=True, eq=False)
class _Measured:
    """Samples in numbers."""

    lengths: Int32Array  # [num_samples]
    loss_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add(self, loss_versions: dict[int, int], trainer_version: int) -> None:
        """One sample: how many of its tokens that bear loss are of which version."""
        for version, count in loss_versions.items():
            age = trainer_version - version
            self.loss_tokens += count
            self.staleness_sum += age * count
            self.staleness_max = max(self.staleness_max, age)


def _measure(samples: Sequence[TrainingSample], trainer_version: int) -> Generator[None, None, _Measured]:
    measured = _Measured(np.empty(len(samples), np.int32))
    for first in range(0, len(samples), MEASURED_AT_ONCE):
        some = samples[first : first + MEASURED_AT_ONCE]
        measured.lengths[first : first + len(some)] = [sample.num_tokens for sample in some]
        for sample in some:
            measured.add(sample.loss_versions(), trainer_version)
        yield
    return measured


def _summary(
    groups: Sequence[SampledGroup],
    plan: RowPlan,
    measured: _Measured,
    *,
    step: int,
    trainer_version: int,
    packing: Packing,
) -> BatchSummary:
    num_tokens = int(measured.lengths.sum(dtype=np.int64))
    return BatchSummary(
        step=step,
        trainer_version=trainer_version,
        num_samples=len(plan.order),
        num_rollouts=sum(len(group.trained) for group in groups),
        num_tokens=num_tokens,
        loss_tokens=measured.loss_tokens,
        masked_tokens=sum(group.masked_tokens for group in groups),
        num_rows=plan.num_rows,
        row_tokens=packing.row_tokens,
        staleness_mean=measured.staleness_sum / max(1, measured.loss_tokens),
        staleness_max=measured.staleness_max,
        padding=plan.padding,
    )
