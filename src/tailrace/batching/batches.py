"""Samples to one batch: columns in row order, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.batching.packing import RowPlan, plan_rows
from tailrace.batching.samples import SampledGroup
from tailrace.records import Batch, BatchSummary, BoolArray, Int32Array, TrainingSample


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
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.asarray([sample.num_tokens for sample in samples], np.int32)
    plan = plan_rows(lengths, row_tokens)
    ordered = [samples[index] for index in plan.order]
    environments = tuple(sorted({sample.environment for sample in samples}))
    policy_versions = np.concatenate([sample.branch.policy_versions for sample in ordered])
    loss_mask = np.concatenate([sample.loss_mask for sample in ordered])
    batch = Batch(
        summary=_summary(
            groups,
            plan,
            lengths,
            staleness=judged_version - policy_versions[loss_mask],
            step=step,
            judged_version=judged_version,
            row_tokens=row_tokens,
        ),
        token_ids=np.concatenate([sample.branch.token_ids for sample in ordered]),
        logprobs=np.concatenate([sample.branch.logprobs for sample in ordered]),
        policy_versions=policy_versions,
        loss_mask=loss_mask,
        mixed_cache=_mixed_cache(ordered),
        advantages=np.concatenate([sample.advantages for sample in ordered]),
        temperatures=np.asarray([sample.temperature for sample in ordered], np.float32),
        sample_offsets=np.concatenate([[0], np.cumsum(lengths[plan.order])]).astype(np.int32),
        row_offsets=plan.row_offsets,
        environment_ids=_environment_ids(ordered, environments),
        environments=environments,
        scheduler_state=scheduler_state,
    )
    return FormedBatch(batch, list(groups))


def _mixed_cache(ordered: Sequence[TrainingSample]) -> BoolArray:
    mixed = np.zeros(sum(sample.num_tokens for sample in ordered), np.bool_)
    offset = 0
    for sample in ordered:
        for start, end in sample.branch.mixed_spans:
            mixed[offset + start : offset + end] = True
        offset += sample.num_tokens
    return mixed


def _environment_ids(samples: Sequence[TrainingSample], environments: tuple[str, ...]) -> Int32Array:
    ids = {environment: index for index, environment in enumerate(environments)}
    return np.asarray([ids[sample.environment] for sample in samples], np.int32)


def _summary(
    groups: Sequence[SampledGroup],
    plan: RowPlan,
    lengths: Int32Array,
    *,
    staleness: Int32Array,  # [loss_tokens]
    step: int,
    judged_version: int,
    row_tokens: int,
) -> BatchSummary:
    num_tokens = int(lengths.sum())
    return BatchSummary(
        step=step,
        judged_version=judged_version,
        num_samples=len(lengths),
        num_rollouts=sum(len(group.trained) for group in groups),
        num_tokens=num_tokens,
        loss_tokens=len(staleness),
        masked_tokens=sum(group.masked_tokens for group in groups),
        num_rows=plan.num_rows,
        row_tokens=row_tokens,
        staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
        staleness_max=int(staleness.max()) if len(staleness) else 0,
        padding=1.0 - num_tokens / (plan.num_rows * row_tokens) if plan.num_rows else 0.0,
    )
