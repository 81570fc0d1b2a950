"""What the tests of this folder send."""

from __future__ import annotations

import numpy as np

from tailrace.records import Batch, BatchSummary, PayloadChunk, PayloadRef, PayloadTable, PayloadTableBuilder


def make_batch(step: int = 1, *, num_samples: int = 3, tokens_per_sample: int = 5, state: bytes = b"{}") -> Batch:
    """A batch of one row per sample whose columns are all different."""
    num_tokens = num_samples * tokens_per_sample
    random = np.random.default_rng(step)
    return Batch(
        summary=make_summary(
            step, num_samples=num_samples, num_tokens=num_tokens, row_tokens=max(1, tokens_per_sample)
        ),
        token_ids=random.integers(0, 1000, num_tokens, dtype=np.int32),
        logprobs=random.standard_normal(num_tokens, dtype=np.float32),
        policy_versions=random.integers(-1, 9, num_tokens, dtype=np.int32),
        loss_mask=random.integers(0, 2, num_tokens).astype(np.bool_),
        mixed_cache=random.integers(0, 2, num_tokens).astype(np.bool_),
        advantages=random.standard_normal(num_tokens, dtype=np.float32),
        temperatures=np.full(num_samples, 0.7, np.float32),
        sample_offsets=np.arange(num_samples + 1, dtype=np.int32) * np.int32(tokens_per_sample),
        row_offsets=np.arange(num_samples + 1, dtype=np.int32),
        environment_ids=np.zeros(num_samples, np.int32),
        environments=("alphabet-sort",),
        payloads=make_payloads(num_samples, tokens_per_sample),
        scheduler_state=state,
    )


def make_payloads(num_samples: int, tokens_per_sample: int) -> PayloadTable:
    """Every sample has a payload of its own, which lacks the last token."""
    builder = PayloadTableBuilder()
    for index in range(num_samples):
        last = max(0, tokens_per_sample - 1)
        ref = PayloadRef(f"memory:{index}", "uint8", (last, 2, 2))
        chunks = [PayloadChunk(0, last, ref), PayloadChunk(last, tokens_per_sample)]
        builder.add(tokens_per_sample, tuple(chunk for chunk in chunks if chunk.start < chunk.end))
    return builder.table()


def make_summary(step: int, *, num_samples: int, num_tokens: int, row_tokens: int) -> BatchSummary:
    return BatchSummary(
        step=step,
        judged_version=step - 1,
        num_samples=num_samples,
        num_rollouts=num_samples,
        num_tokens=num_tokens,
        loss_tokens=num_tokens,
        masked_tokens=0,
        num_rows=num_samples,
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
    "advantages",
    "temperatures",
    "sample_offsets",
    "row_offsets",
    "environment_ids",
)


def assert_same_batch(received: Batch, sent: Batch) -> None:
    assert received.summary == sent.summary
    assert received.environments == sent.environments
    assert received.scheduler_state == sent.scheduler_state
    assert received.payloads.payloads == sent.payloads.payloads
    np.testing.assert_array_equal(received.payloads.chunks, sent.payloads.chunks)
    for column in COLUMNS:
        one, other = getattr(received, column), getattr(sent, column)
        assert one.dtype == other.dtype, column
        np.testing.assert_array_equal(one, other, err_msg=column)
