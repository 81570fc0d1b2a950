"""Samples to one batch: columns in row order, and its summary."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.batching.packing import RowPlan, plan_rows_in_slices
from tailrace.batching.samples import SampledGroup
from tailrace.batching.slices import drained
from tailrace.observability.phases import phase
from tailrace.records import (
    Batch,
    BatchSummary,
    BoolArray,
    Float32Array,
    Int32Array,
    PayloadTableBuilder,
    TrainingSample,
)

MEASURED_AT_ONCE = 2048
"""Samples whose lengths are read in one slice."""
COPIED_AT_ONCE = 64
"""Samples at most in one slice of the copying, ..."""
COPIED_TOKENS_AT_ONCE = 1 << 18
"""... and tokens: some milliseconds, when the pages are fresh."""


@dataclass(frozen=True, slots=True, eq=False)
class FormedBatch:
    """A batch, and the groups it was formed of (for the ledger and for people)."""

    batch: Batch
    groups: list[SampledGroup]


def form_batch(
    groups: Sequence[SampledGroup],
    *,
    step: int,
    judged_version: int,
    row_tokens: int,
    scheduler_state: bytes = b"",
) -> FormedBatch:
    """Lay the samples of `groups` in rows of at most `row_tokens`, and concatenate their columns once."""
    return drained(
        form_batch_in_slices(
            groups,
            step=step,
            judged_version=judged_version,
            row_tokens=row_tokens,
            scheduler_state=scheduler_state,
        )
    )


def form_batch_in_slices(
    groups: Sequence[SampledGroup],
    *,
    step: int,
    judged_version: int,
    row_tokens: int,
    scheduler_state: bytes = b"",
) -> Generator[None, None, FormedBatch]:
    """See `form_batch`; yields now and then."""
    samples = [sample for group in groups for sample in group.samples]
    environments = tuple(sorted({group.group.task.environment for group in groups if group.samples}))
    with phase("plan_rows"):
        lengths = yield from _lengths(samples)
        plan = yield from plan_rows_in_slices(lengths, row_tokens)
    order = plan.order.tolist()
    offsets = np.zeros(len(order) + 1, np.int32)
    np.cumsum(lengths[plan.order], out=offsets[1:])
    columns = _Columns(len(order), int(offsets[-1]), environments)
    with phase("fill_columns"):
        for first, last in _slices(offsets):
            taken = [samples[index] for index in order[first:last]]
            columns.fill(first, taken, offsets[first : last + 1], judged_version)
            yield
    batch = Batch(
        summary=_summary(groups, plan, columns, step=step, judged_version=judged_version, row_tokens=row_tokens),
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        policy_versions=columns.policy_versions,
        loss_mask=columns.loss_mask,
        mixed_cache=columns.mixed_cache,
        advantages=columns.advantages,
        temperatures=columns.temperatures,
        sample_offsets=offsets,
        row_offsets=plan.row_offsets,
        environment_ids=columns.environment_ids,
        environments=environments,
        payloads=columns.payloads.table(),
        scheduler_state=scheduler_state,
    )
    return FormedBatch(batch, list(groups))


@dataclass(slots=True, eq=False)
class _Columns:
    """The batch's columns, filled from left to right, and what is counted on the way."""

    num_samples: int
    num_tokens: int
    environments: tuple[str, ...]
    token_ids: Int32Array = field(init=False)
    logprobs: Float32Array = field(init=False)
    policy_versions: Int32Array = field(init=False)
    loss_mask: BoolArray = field(init=False)
    mixed_cache: BoolArray = field(init=False)
    advantages: Float32Array = field(init=False)
    temperatures: Float32Array = field(init=False)
    environment_ids: Int32Array = field(init=False)
    payloads: PayloadTableBuilder = field(default_factory=PayloadTableBuilder)
    loss_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def __post_init__(self) -> None:
        self.token_ids, self.policy_versions = np.empty(self.num_tokens, np.int32), np.empty(self.num_tokens, np.int32)
        self.logprobs, self.advantages = np.empty(self.num_tokens, np.float32), np.empty(self.num_tokens, np.float32)
        self.temperatures = np.empty(self.num_samples, np.float32)
        self.environment_ids = np.empty(self.num_samples, np.int32)
        self.loss_mask, self.mixed_cache = np.empty(self.num_tokens, np.bool_), np.zeros(self.num_tokens, np.bool_)

    def fill(self, first: int, samples: Sequence[TrainingSample], offsets: Int32Array, judged_version: int) -> None:
        """Samples `first` and following, whose tokens begin at `offsets`."""
        ids = {environment: index for index, environment in enumerate(self.environments)}
        self.temperatures[first : first + len(samples)] = [sample.temperature for sample in samples]
        self.environment_ids[first : first + len(samples)] = [ids[sample.environment] for sample in samples]
        where = slice(int(offsets[0]), int(offsets[-1]))
        branches = [sample.branch for sample in samples]
        for branch in branches:
            self.payloads.add(branch.num_tokens, branch.payload_chunks)
        np.concatenate([branch.token_ids for branch in branches], out=self.token_ids[where])
        np.concatenate([branch.logprobs for branch in branches], out=self.logprobs[where])
        np.concatenate([branch.policy_versions for branch in branches], out=self.policy_versions[where])
        np.concatenate([sample.loss_mask for sample in samples], out=self.loss_mask[where])
        for sample, start, end in zip(samples, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self.advantages[start:end] = sample.advantages
            for mixed_start, mixed_end in sample.branch.mixed_spans:
                self.mixed_cache[start + mixed_start : start + mixed_end] = True
        ages = judged_version - self.policy_versions[where][self.loss_mask[where]]
        self.loss_tokens += len(ages)
        self.staleness_sum += int(ages.sum(dtype=np.int64))
        self.staleness_max = max(self.staleness_max, int(ages.max(initial=0)))


def _slices(offsets: Int32Array) -> Iterator[tuple[int, int]]:
    """(first, last) of runs of samples that are short in samples and, but for a very long sample, in tokens."""
    first, count = 0, len(offsets) - 1
    while first < count:
        fitting = int(np.searchsorted(offsets, offsets[first] + COPIED_TOKENS_AT_ONCE, side="right")) - 1
        last = min(max(fitting, first + 1), first + COPIED_AT_ONCE, count)
        yield first, last
        first = last


def _lengths(samples: Sequence[TrainingSample]) -> Generator[None, None, Int32Array]:
    """[num_samples], in tokens."""
    lengths = np.empty(len(samples), np.int32)
    for first in range(0, len(samples), MEASURED_AT_ONCE):
        measured = samples[first : first + MEASURED_AT_ONCE]
        lengths[first : first + len(measured)] = [sample.num_tokens for sample in measured]
        yield
    return lengths


def _summary(
    groups: Sequence[SampledGroup],
    plan: RowPlan,
    columns: _Columns,
    *,
    step: int,
    judged_version: int,
    row_tokens: int,
) -> BatchSummary:
    return BatchSummary(
        step=step,
        judged_version=judged_version,
        num_samples=len(plan.order),
        num_rollouts=sum(len(group.trained) for group in groups),
        num_tokens=columns.num_tokens,
        loss_tokens=columns.loss_tokens,
        masked_tokens=sum(group.masked_tokens for group in groups),
        num_rows=plan.num_rows,
        row_tokens=row_tokens,
        staleness_mean=columns.staleness_sum / max(1, columns.loss_tokens),
        staleness_max=columns.staleness_max,
        padding=1.0 - columns.num_tokens / (plan.num_rows * row_tokens) if plan.num_rows else 0.0,
    )
