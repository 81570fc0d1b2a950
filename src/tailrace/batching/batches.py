"""Samples to one batch: the plan of its rows and ranks, and its summary. Reads no token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.batching.packing import Packing, plan_rows
from tailrace.batching.samples import SampledGroup
from tailrace.batching.slices import SAMPLES_AT_ONCE
from tailrace.batching.whitening import whiten
from tailrace.errors import TrainingError
from tailrace.records import CROSS_ENTROPY_WEIGHTS, BatchSummary, ColumnKind, Int32Array, PlannedBatch, TrainingSample
from tailrace.tracing.phases import phase


@dataclass(frozen=True, slots=True, eq=False)
class FormedBatch:
    """A batch, and the groups it was formed of (for the ledger and for people)."""

    batch: PlannedBatch
    groups: list[SampledGroup]


def form_batch(
    groups: Sequence[SampledGroup],
    *,
    step: int,
    trainer_version: int,
    packing: Packing,
    whiten_advantages: bool = False,
) -> Generator[None, None, FormedBatch]:
    """Lay the samples of `groups` in rows, and the rows on ranks; yields now and then.

    `trainer_version` is the highest version that the trainer can have at `step`.
    """
    samples = [sample for group in groups for sample in group.samples]
    with phase("plan_rows"):
        lengths, versions, columns = yield from _measure(samples)
        demonstrations = (
            sum(not sample.loss_versions() for sample in samples) if CROSS_ENTROPY_WEIGHTS in columns else 0
        )
        plan = yield from plan_rows(lengths, packing)
    if len(samples) > SAMPLES_AT_ONCE:
        yield
    whitening = (yield from whiten(samples)) if whiten_advantages else None
    loss_tokens = sum(versions.values())
    staleness_sum = sum((trainer_version - version) * count for version, count in versions.items())
    summary = BatchSummary(
        step=step,
        trainer_version=trainer_version,
        num_samples=len(samples),
        num_rollouts=sum(len(group.trained) for group in groups),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        loss_tokens=loss_tokens,
        masked_tokens=sum(group.masked_tokens for group in groups),
        num_rows=plan.num_rows,
        row_tokens=packing.row_tokens,
        staleness_mean=staleness_sum / max(1, loss_tokens),
        staleness_max=max(0, trainer_version - min(versions, default=trainer_version)),
        padding=plan.padding,
        environments=tuple(sorted({group.group.task.environment for group in groups})),
        num_demonstrations=demonstrations,
        cross_entropy_tokens=sum(sample.branch.num_weighted for sample in samples)
        if CROSS_ENTROPY_WEIGHTS in columns
        else 0,
    )
    batch = PlannedBatch(
        summary=summary,
        samples=[samples[index] for index in plan.order.tolist()],
        lengths=lengths[plan.order],
        row_offsets=plan.row_offsets,
        rank_offsets=plan.rank_offsets,
        whitening=whitening,
        columns=columns,
    )
    return FormedBatch(batch, list(groups))


def _measure(
    samples: Sequence[TrainingSample],
) -> Generator[None, None, tuple[Int32Array, dict[int, int], dict[str, ColumnKind]]]:
    """Lengths [num_samples], how many tokens that bear loss are of which version, and the columns that any has."""
    lengths, versions, columns = np.empty(len(samples), np.int32), dict[int, int](), dict[str, ColumnKind]()
    for first in range(0, len(samples), SAMPLES_AT_ONCE):
        some = samples[first : first + SAMPLES_AT_ONCE]
        lengths[first : first + len(some)] = [sample.num_tokens for sample in some]
        for sample in some:
            for version, count in sample.loss_versions().items():
                versions[version] = versions.get(version, 0) + count
            if sample.branch.columns:
                _add_columns(columns, sample)
        yield
    return lengths, versions, columns


def _add_columns(columns: dict[str, ColumnKind], sample: TrainingSample) -> None:
    """Those of a sample; float32 where some are whole numbers and others are not.

    Raises `TrainingError` where it means another width by a name than the others do.
    """
    for name, column in sample.branch.columns.items():
        kind = ColumnKind.of(column)
        other = columns.get(name, kind)
        if other.width != kind.width:
            raise TrainingError(
                f"column {name!r} is {kind} in rollout {sample.rollout_id} and {other} in another of its batch: a "
                "batch has columns of one width by a name"
            )
        columns[name] = other.joined(kind)
