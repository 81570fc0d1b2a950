"""What the tests of this folder send."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.batching.packing import Packing, plan_rows
from tailrace.batching.slices import drained
from tailrace.records import (
    Batch,
    BatchSummary,
    Branch,
    ColumnKind,
    Completion,
    FeedSample,
    FinishReason,
    GroupId,
    PayloadChunk,
    PayloadRef,
    PlannedBatch,
    RolloutId,
    SamplingParams,
    Supports,
    TaskId,
    TrainingSample,
    sample_of,
)


def make_batch(step: int = 1, *, num_samples: int = 3, tokens_per_sample: int = 5, num_ranks: int = 1) -> PlannedBatch:
    """Samples of one length, whose columns are all different."""
    return plan([tokens_per_sample] * num_samples, step=step, num_ranks=num_ranks)


def plan(
    lengths: Sequence[int],
    *,
    step: int = 1,
    num_ranks: int = 1,
    row_tokens: int = 0,
    oldest_version: int = 0,
) -> PlannedBatch:
    """Samples of these lengths in rows (by default of the longest), one after the other as they are packed."""
    random = np.random.default_rng(step)
    samples = [make_sample(random, number, length, oldest_version) for number, length in enumerate(lengths)]
    row_tokens = row_tokens or max(1, *lengths, 0)
    rows = drained(plan_rows(lengths, Packing(row_tokens, num_ranks, num_shapes=1)))
    return PlannedBatch(
        summary=make_summary(
            step, num_samples=len(samples), num_tokens=sum(lengths), num_rows=rows.num_rows, row_tokens=row_tokens
        ),
        samples=[samples[number] for number in rows.order.tolist()],
        lengths=np.asarray(lengths, np.int32)[rows.order],
        row_offsets=rows.row_offsets,
        rank_offsets=rows.rank_offsets,
        num_support_ids=sum(sample.branch.num_support_ids for sample in samples),
        columns={name: kind for sample in samples for name, kind in kinds_of(sample).items()},
    )


def kinds_of(sample: TrainingSample) -> dict[str, ColumnKind]:
    return {name: ColumnKind.of(column) for name, column in sample.branch.columns.items()}


def make_sample(random: np.random.Generator, number: int, length: int, oldest_version: int = 0) -> TrainingSample:
    """A third of it is a prompt; every other one has its advantages per token, and columns with names of their own."""
    branch = Branch()
    prompt = length // 3
    branch.extend_context(random.integers(0, 1000, prompt, dtype=np.int32))
    sampled, kept = length - prompt, max(0, length - 1)
    ref = PayloadRef(f"memory:{number}", "uint8", (kept, 2, 2))
    branch.extend_completion(
        Completion(
            token_ids=random.integers(0, 1000, sampled, dtype=np.int32),
            logprobs=random.standard_normal(sampled, dtype=np.float32),
            policy_versions=random.integers(0, 9, sampled, dtype=np.int32),
            finish_reason=FinishReason.STOP,
            routed_experts=(PayloadChunk(0, kept, ref),) if kept else (),
            mixed_spans=((0, 1), (sampled - 1, sampled)) if sampled > 2 else (),
            supports=None if number == 1 else make_supports(sampled),
        )
    )
    if number % 2 and length:
        branch.set_column("teacher", random.standard_normal(length - 1))  # the rest is 0
        branch.set_column("top_ids", random.integers(0, 1000, (length, 3)))
    return TrainingSample(
        rollout_id=RolloutId(f"g.{number}"),
        group_id=GroupId("g"),
        temperature=0.5 + 0.25 * (number % 3),
        branch=branch,
        advantages=random.standard_normal(length, dtype=np.float32) if number % 2 else float(number),
        oldest_version=oldest_version,
        branch_index=number % 2,
        environment=("names", "sums")[number % 3 == 1],
    )


def handed(sample: TrainingSample) -> FeedSample:
    """As it is handed to a trainer outside."""
    return FeedSample(
        sample_id=sample_of(sample.rollout_id, sample.branch_index),
        sample=sample,
        task_id=TaskId("task"),
        reward=0.5,
        sampling=SamplingParams(temperature=sample.temperature),
        trainer_version=7,
        group_rollouts=4,
    )


def make_supports(num_tokens: int) -> Supports:
    """Of 0, 1, 2 and 3 tokens in turn."""
    counts = np.arange(num_tokens, dtype=np.int32) % 4
    return Supports(np.arange(counts.sum(), dtype=np.int32), counts)


def make_summary(step: int, *, num_samples: int, num_tokens: int, num_rows: int, row_tokens: int) -> BatchSummary:
    return BatchSummary(
        step=step,
        trainer_version=step - 1,
        num_samples=num_samples,
        num_rollouts=num_samples,
        num_tokens=num_tokens,
        loss_tokens=num_tokens,
        masked_tokens=0,
        num_rows=num_rows,
        row_tokens=row_tokens,
        staleness_mean=0.5,
        staleness_max=2,
        padding=0.0,
    )


COLUMNS = (
    "token_ids",
    "logprobs",
    "policy_versions",
    "loss_mask",
    "mixed_spans",
    "support_counts",
    "support_ids",
    "support_offsets",
    "advantages",
    "advantage_offsets",
    "temperatures",
    "sample_offsets",
    "row_offsets",
)


def assert_same_batch(received: Batch, sent: PlannedBatch, rank: int = 0) -> None:
    """What a rank received is what was sent to it."""
    expected = sent.assembled(rank)
    assert (received.rank, received.num_ranks) == (rank, sent.num_ranks)
    assert received.summary == expected.summary
    assert received.payloads.payloads == expected.payloads.payloads
    assert received.origins == expected.origins
    np.testing.assert_array_equal(received.payloads.chunks, expected.payloads.chunks)
    for column in COLUMNS:
        one, other = getattr(received, column), getattr(expected, column)
        assert one.dtype == other.dtype, column
        np.testing.assert_array_equal(one, other, err_msg=column)
    assert received.columns.keys() == expected.columns.keys()
    for name, values in expected.columns.items():
        assert received.columns[name].dtype == values.dtype, name
        np.testing.assert_array_equal(received.columns[name], values, err_msg=name)
