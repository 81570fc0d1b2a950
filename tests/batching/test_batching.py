from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batching import (
    ZERO_SPREAD,
    Packing,
    SampledGroup,
    compute_advantages,
    filter_reason,
    form_batch,
    sample_group,
)
from tailrace.batching.advantages import group_advantages
from tailrace.batching.slices import drained
from tailrace.records import Branch, Completion, FinishReason, Group, GroupId, Rollout, RolloutId, Task, TaskId
from tests.scheduling.world import make_rollout

TASK = Task(task_id=TaskId("toy/0"), environment="toy", index=0, row={})


def group_of(rewards: list[float], *, tokens: list[int] | None = None, versions: list[int] | None = None) -> Group:
    group_id = GroupId("g")
    rollouts: list[Rollout] = [
        make_rollout(
            TASK,
            group_id,
            RolloutId(f"g.{number}"),
            reward=reward,
            tokens=(tokens or [3] * len(rewards))[number],
            version=(versions or [0] * len(rewards))[number],
        )
        for number, reward in enumerate(rewards)
    ]
    group = Group(group_id=group_id, task=TASK, rollouts=rollouts)
    compute_advantages(group, "mean")
    return group


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_mean_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert abs(sum(group_advantages(rewards, "mean"))) < 1e-9 * max(1, len(rewards) * max(map(abs, rewards)))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1))
def test_mean_std_advantages_have_unit_spread(rewards: list[int]) -> None:
    assert np.std(group_advantages([float(reward) for reward in rewards], "mean_std")) == pytest.approx(1, abs=1e-4)


def test_only_groups_of_equal_rewards_are_filtered() -> None:
    assert filter_reason(group_of([0.3, 0.3, 0.3]), filter_zero_spread=True) == ZERO_SPREAD
    assert filter_reason(group_of([0.3, 0.3, 0.3]), filter_zero_spread=False) is None
    assert filter_reason(group_of([0.3, 0.4, 0.3]), filter_zero_spread=True) is None


def test_stale_tokens_stay_as_context_and_lose_their_loss() -> None:
    sampled = sample_group(group_of([0.0, 1.0], versions=[2, 5]), oldest_version=4)
    assert [(rollout.rollout_id, reason) for rollout, reason in sampled.filtered] == [("g.0", "stale")]
    assert sampled.masked_tokens == 0  # a rollout that is stale throughout is wasted, not masked
    assert [sample.num_tokens for sample in sampled.samples] == [5]


def test_masked_are_the_stale_tokens_of_rollouts_that_are_trained_on() -> None:
    group = group_of([0.0, 1.0], versions=[1, 5])
    newer = make_rollout(TASK, GroupId("g"), RolloutId("newer"), reward=0.0, version=5).branches[0]
    group.rollouts[0].branches[0].extend_completion(
        Completion(
            token_ids=newer.token_ids[newer.loss_mask],
            logprobs=newer.logprobs[newer.loss_mask],
            policy_versions=newer.policy_versions[newer.loss_mask],
            finish_reason=FinishReason.STOP,
        )
    )
    sampled = sample_group(group, oldest_version=4)
    assert sampled.masked_tokens == 3
    assert [int(sample.loss_mask.sum()) for sample in sampled.samples] == [3, 3]


def test_what_was_sampled_over_older_caches_is_found_in_its_row() -> None:
    group = group_of([0.0, 1.0], tokens=[4, 5])
    for rollout, spans in zip(group.rollouts, (((1, 3),), ((0, 1), (4, 5))), strict=True):
        [first] = rollout.branches
        completion = Completion(
            first.token_ids[2:], first.logprobs[2:], first.policy_versions[2:], FinishReason.LENGTH, mixed_spans=spans
        )
        rollout.branches[0] = Branch()
        rollout.branches[0].extend_context(first.token_ids[:2])
        rollout.branches[0].extend_completion(completion)
    sampled = sample_group(group, oldest_version=0)
    batch = drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(40))).batch.assembled()
    row = batch.row(0)
    ends = np.cumsum(row.sample_lengths)
    found = {
        length: row.mixed_cache[end - length : end].nonzero()[0].tolist()
        for end, length in zip(ends, row.sample_lengths, strict=True)
    }
    assert found == {6: [3, 4], 7: [2, 6]}


@given(st.lists(st.integers(1, 30), min_size=2, max_size=20))
def test_a_batchs_rows_are_its_samples_side_by_side(tokens: list[int]) -> None:
    group = group_of([float(number) for number in range(len(tokens))], tokens=tokens)
    sampled: SampledGroup = sample_group(group, oldest_version=0)
    batch = drained(form_batch([sampled], step=2, trainer_version=1, packing=Packing(40))).batch.assembled()
    assert batch.summary.loss_tokens == batch.loss_mask.sum() == sum(tokens)
    assert batch.summary.num_tokens == len(batch.token_ids) == sum(tokens) + 2 * len(tokens)
    seen = []
    for index in range(batch.num_rows):
        row = batch.row(index)
        assert len(row.token_ids) == row.sample_lengths.sum() <= 40
        starts = np.cumsum(row.sample_lengths) - row.sample_lengths
        for start, length in zip(starts, row.sample_lengths, strict=True):
            seen.append((int(length) - 2, float(row.advantages[start])))
            assert row.loss_mask[start : start + length].tolist() == [False] * 2 + [True] * (length - 2)
    expected = [(count, group_advantages(group.rewards, "mean")[n]) for n, count in enumerate(tokens)]
    assert sorted(seen) == [pytest.approx(pair) for pair in sorted(expected)]


def test_a_batch_is_formed_of_views_and_counts_what_bears_loss() -> None:
    group = group_of([0.0, 1.0, 0.5], tokens=[4, 9, 2], versions=[0, 2, 3])
    sampled = sample_group(group, oldest_version=2)
    batch = drained(form_batch([sampled], step=5, trainer_version=4, packing=Packing(16, num_ranks=2))).batch
    for piece, sample in zip(batch.pieces("token_ids"), batch.samples, strict=True):
        assert np.shares_memory(piece, sample.branch.token_ids)
    summary, parts = batch.summary, [batch.assembled(rank) for rank in range(2)]
    assert (summary.loss_tokens, summary.staleness_max, summary.staleness_mean) == (11, 2, pytest.approx(20 / 11))
    assert summary.loss_tokens == sum(int(part.loss_mask.sum()) for part in parts)
    assert summary.num_tokens == sum(len(part.token_ids) for part in parts)
    assert batch.loss_versions() == {2: 9, 3: 2}


def test_advantages_per_token_need_one_for_each_token() -> None:
    group = group_of([0.0, 1.0])
    group.advantages = [np.ones(5, np.float32), np.ones(4, np.float32)]
    with pytest.raises(ValueError, match="has 5 tokens"):
        sample_group(group, oldest_version=0)


def test_advantages_per_token_and_per_sample_lie_in_one_batch() -> None:
    group = group_of([0.0, 1.0])
    group.advantages = [np.arange(5, dtype=np.float32), 7.0]
    sampled = sample_group(group, oldest_version=0)
    row = drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(40))).batch.assembled().row(0)
    assert sorted(row.advantages.tolist()) == [0, 1, 2, 3, 4, 7, 7, 7, 7, 7]
