"""Samples to one batch: the plan of its rows and ranks, and its summary. Reads no token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tailrace.batching.packing import Packing, plan_rows
from tailrace.batching.samples import SampledGroup
from tailrace.batching.slices import SAMPLES_AT_ONCE, drained
from tailrace.batching.whitening import whiten
from tailrace.errors import TrainingError
from tailrace.records import (
    CROSS_ENTROPY_WEIGHTS,
    WEIGHTS_OF_SAMPLED,
    BatchSummary,
    ColumnKind,
    Int32Array,
    PlannedBatch,
    TrainingSample,
)
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
        found = yield from _measure(samples)
        plan = yield from plan_rows(found.lengths, packing)
    if len(samples) > SAMPLES_AT_ONCE:
        yield
    whitening = (yield from whiten(samples)) if whiten_advantages else None
    summary = msgspec.structs.replace(
        _summary(groups, samples, found, step=step, trainer_version=trainer_version),
        num_rows=plan.num_rows,
        row_tokens=packing.row_tokens,
        padding=plan.padding,
    )
    if len(samples) > SAMPLES_AT_ONCE:
        yield
    batch = PlannedBatch(
        summary=summary,
        samples=[samples[index] for index in plan.order.tolist()],
        lengths=found.lengths[plan.order],
        row_offsets=plan.row_offsets,
        rank_offsets=plan.rank_offsets,
        num_support_ids=found.num_support_ids,
        whitening=whitening,
        columns=found.columns,
    )
    return FormedBatch(batch, list(groups))


def reported_batch(groups: Sequence[SampledGroup], *, step: int, trainer_version: int) -> FormedBatch:
    """What an outside trainer took a step on, from weights of `trainer_version`. How it laid rows nobody knows: there
    are none here."""
    samples = [sample for group in groups for sample in group.samples]
    found = drained(_measure(samples))
    batch = PlannedBatch(
        summary=_summary(groups, samples, found, step=step, trainer_version=trainer_version),
        samples=samples,
        lengths=found.lengths,
        row_offsets=np.zeros(1, np.int32),
        rank_offsets=np.zeros(1, np.int32),
        num_support_ids=found.num_support_ids,
        columns=found.columns,
    )
    return FormedBatch(batch, list(groups))


@dataclass(slots=True, eq=False)
class _Measured:
    """What all samples of a batch are together."""

    lengths: Int32Array  # [num_samples]
    versions: dict[int, int] = field(default_factory=dict)
    """How many tokens that bear loss are of which."""
    columns: dict[str, ColumnKind] = field(default_factory=dict)
    """That any sample has."""
    num_support_ids: int = 0


def _summary(
    groups: Sequence[SampledGroup],
    samples: Sequence[TrainingSample],
    found: _Measured,
    *,
    step: int,
    trainer_version: int,
) -> BatchSummary:
    """Without rows."""
    versions, columns, loss_tokens = found.versions, found.columns, sum(found.versions.values())
    demonstrates = CROSS_ENTROPY_WEIGHTS in columns
    # weights that a trainer has given up may be newer than those that it went back to
    staleness_sum = sum(max(0, trainer_version - version) * count for version, count in versions.items())
    return BatchSummary(
        step=step,
        trainer_version=trainer_version,
        num_samples=len(samples),
        num_rollouts=sum(len(group.trained) for group in groups),
        num_tokens=int(found.lengths.sum(dtype=np.int64)),
        loss_tokens=loss_tokens,
        masked_tokens=sum(group.masked_tokens for group in groups),
        num_rows=0,
        row_tokens=0,
        staleness_mean=staleness_sum / max(1, loss_tokens),
        staleness_max=max(0, trainer_version - min(versions, default=trainer_version)),
        padding=0.0,
        environments=tuple(sorted({group.group.task.environment for group in groups})),
        num_demonstrations=sum(not sample.loss_versions() for sample in samples) if demonstrates else 0,
        cross_entropy_tokens=sum(sample.branch.num_weighted for sample in samples) if demonstrates else 0,
        weightless_tokens={
            name: sum(sample.weightless(name) for sample in samples)
            for name in sorted(WEIGHTS_OF_SAMPLED & columns.keys())
        },
    )


def _measure(samples: Sequence[TrainingSample]) -> Generator[None, None, _Measured]:
    """Goes through the samples; yields now and then."""
    found = _Measured(np.empty(len(samples), np.int32))
    versions = found.versions
    for first in range(0, len(samples), SAMPLES_AT_ONCE):
        some = samples[first : first + SAMPLES_AT_ONCE]
        found.lengths[first : first + len(some)] = [sample.num_tokens for sample in some]
        found.num_support_ids += sum(sample.branch.num_support_ids for sample in some)
        for sample in some:
            for version, count in sample.loss_versions().items():
                versions[version] = versions.get(version, 0) + count
            if sample.branch.columns:
                _add_columns(found.columns, sample)
        yield
    return found


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
