from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batching import (
    INCREMENTAL,
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
from tailrace.batching.whitening import whiten
from tailrace.errors import SettingsError
from tailrace.records import (
    Batch,
    BatchRow,
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Rollout,
    RolloutId,
    Task,
    TaskId,
)
from tailrace.scheduling.release import EarlyRelease
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


def demonstrate(rollout: Rollout, tokens: int = 2) -> None:
    branch = Branch(temperature=1.0)
    branch.extend_context([1, *range(tokens)])
    branch.set_column("cross_entropy_weights", [1] * tokens, start=1)
    rollout.branches.append(branch)


@pytest.mark.parametrize("per_token", [False, True])
def test_demonstrations_are_samples_without_a_loss_of_rewards(per_token: bool) -> None:
    group = group_of([0.0, 1.0], tokens=[3, 4])
    if per_token:
        group.advantages = [np.ones(rollout.branches[0].num_tokens, np.float32) for rollout in group.rollouts]
    demonstrate(group.rollouts[1])
    group.rollouts[0].branches[0].set_column("cross_entropy_weights", [1.0, 0.0, 0.5], start=2)
    batch = drained(form_batch([sample_group(group, oldest_version=0)], step=1, trainer_version=0, packing=Packing(9)))
    summary = batch.batch.summary
    assert (summary.num_samples, summary.num_demonstrations, summary.num_sequences) == (3, 1, 2)
    assert (summary.loss_tokens, summary.cross_entropy_tokens) == (7, 4)
    received = batch.batch.assembled()
    weights = received.columns["cross_entropy_weights"]
    assert np.count_nonzero(weights) == 4
    assert sorted(weights[~received.loss_mask].tolist()) == [0.0] * (len(weights) - 9) + [1.0, 1.0]
    assert sorted(received.temperatures.tolist()) == [1.0, 1.0, 1.0]


def test_a_group_is_trained_on_for_its_demonstrations_whatever_its_rewards() -> None:
    group = group_of([1.0, 1.0])
    assert filter_reason(group, filter_zero_spread=True) == ZERO_SPREAD
    demonstrate(group.rollouts[0])
    assert filter_reason(group, filter_zero_spread=True) is None


def test_a_group_is_trained_on_for_its_teacher_where_that_weighs_anything() -> None:
    group = group_of([1.0, 1.0])
    branches = [rollout.branches[0] for rollout in group.rollouts]
    for branch in branches:
        branch.set_column("teacher_logprobs", np.full(branch.num_tokens, -0.5))
    assert filter_reason(group, filter_zero_spread=True) is None
    for branch in branches:
        branch.set_column("distillation_weights", np.zeros(branch.num_tokens))
    assert filter_reason(group, filter_zero_spread=True) == ZERO_SPREAD
    branches[1].set_column("distillation_weights", [0.1], start=branches[1].num_tokens - 1)
    assert filter_reason(group, filter_zero_spread=True) is None


def test_what_bears_cross_entropy_is_never_too_old() -> None:
    group = group_of([0.0, 1.0, 0.5, 0.0, 0.0], versions=[0, 5, 5, 0, 0])
    for rollout in group.rollouts[:3]:
        demonstrate(rollout)
    del group.rollouts[2].branches[0]
    group.rollouts[3].branches[0].set_column("cross_entropy_weights", [0.5, 0.5], start=3)
    sampled = sample_group(group, oldest_version=3)
    assert [(rollout.rollout_id, reason) for rollout, reason in sampled.filtered] == [("g.4", "stale")]
    assert [(one.rollout_id, one.branch_index) for one in sampled.samples] == [
        ("g.0", 1), ("g.1", 0), ("g.1", 1), ("g.2", 0), ("g.3", 0),
    ]  # fmt: skip
    assert sampled.loss_tokens == [0, 3, 0, 0]
    assert sampled.masked_tokens == 6
    summary = drained(form_batch([sampled], step=1, trainer_version=5, packing=Packing(9))).batch.summary
    assert (summary.loss_tokens, summary.cross_entropy_tokens, summary.num_sequences) == (3, 8, 1)


def test_demonstrations_go_with_a_rollout_that_is_left_out() -> None:
    group = group_of([0.0, 1.0], versions=[0, 5])
    for rollout in group.rollouts:
        demonstrate(rollout)
    sampled = sample_group(group, oldest_version=3, drop_stale=True)
    assert [(rollout.rollout_id, reason) for rollout, reason in sampled.filtered] == [("g.0", "stale")]
    assert [sample.rollout_id for sample in sampled.samples] == ["g.1", "g.1"]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_mean_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert abs(sum(group_advantages(rewards, "mean"))) < 1e-9 * max(1, len(rewards) * max(map(abs, rewards)))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1))
def test_mean_std_advantages_have_unit_spread(rewards: list[int]) -> None:
    assert np.std(group_advantages([float(reward) for reward in rewards], "mean_std")) == pytest.approx(1, abs=1e-4)


REWARDS = st.lists(st.integers(0, 5).map(float), min_size=2, max_size=16)


@given(REWARDS)
def test_rloo_takes_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = [reward - mean for reward, mean in zip(rewards, others, strict=True)]
    assert group_advantages(rewards, "rloo") == pytest.approx(expected, abs=1e-12)


@given(REWARDS)
def test_maxrl_weighs_a_group_by_the_inverse_of_its_mean(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    expected = [(reward - mean) / mean if mean else 0.0 for reward in rewards]
    assert group_advantages(rewards, "maxrl") == pytest.approx(expected, abs=1e-12)


@given(REWARDS)
def test_rewards_may_be_advantages_as_they_are(rewards: list[float]) -> None:
    assert group_advantages(rewards, "reward") == rewards


def test_maxrl_refuses_rewards_below_0() -> None:
    with pytest.raises(SettingsError, match=r"'maxrl' is for rewards of 0 and above, and a rollout has -0.5"):
        group_advantages([1.0, -0.5], "maxrl")


@given(REWARDS)
def test_early_release_knows_each_incremental_advantage(rewards: list[float]) -> None:
    release = EarlyRelease(min_known_siblings=len(rewards) - 1)
    released = dict(pair for reward in rewards for pair in release.learn(reward))
    advantages = [released.get(number, 0.0) for number in range(len(rewards))]
    assert advantages == pytest.approx(group_advantages(rewards, "rloo"), abs=1e-12)
    assert {"mean", "rloo"} == INCREMENTAL  # the former differs by the factor (n - 1) / n


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


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=2, max_size=12),
    st.floats(-5, 5),
    st.floats(0.1, 50),
    st.integers(1, 3),
)
def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_that_bear_loss(
    kinds: list[tuple[int, bool]], shift: float, scale: float, ranks: int
) -> None:
    """Some advantages are per token; tokens of version 0 are stale; the batch is split over ranks."""
    generator = np.random.default_rng(len(kinds))
    group = group_of([0.0] * len(kinds), tokens=[count for count, _ in kinds], versions=[0, *([1] * (len(kinds) - 1))])
    group.advantages = [
        shift + scale * generator.normal(size=count + 2 if per_token else None) for count, per_token in kinds
    ]
    group.advantages = [np.asarray(one, np.float32) if np.ndim(one) else float(one) for one in group.advantages]
    sampled, packing = sample_group(group, oldest_version=1), Packing(16, num_ranks=ranks)
    plain, whitened = (
        drained(form_batch([sampled], step=1, trainer_version=1, packing=packing, whiten_advantages=whiten)).batch
        for whiten in (False, True)
    )
    before, after = (
        np.concatenate(
            [row.advantages[row.loss_mask] for rank in range(ranks) for row in rows_of(batch.assembled(rank))]
        ).astype(np.float64)
        for batch in (plain, whitened)
    )
    np.testing.assert_allclose(after, (before - before.mean()) / (before.std() + 1e-6), rtol=1e-4, atol=1e-4)


def rows_of(batch: Batch) -> list[BatchRow]:
    return [batch.row(index) for index in range(batch.num_rows)]


def test_equal_advantages_are_whitened_to_0() -> None:
    group = group_of([0.0, 1.0])
    group.advantages = [0.5, 0.5]
    forming = form_batch(
        [sample_group(group, oldest_version=0)],
        step=1,
        trainer_version=0,
        packing=Packing(40),
        whiten_advantages=True,
    )
    assert not drained(forming).batch.assembled().advantages.any()


def test_whitening_yields_to_the_event_loop_and_leaves_samples_alone() -> None:
    rewards = [float(number % 7) for number in range(3000)]
    group = group_of(rewards, tokens=[1] * len(rewards))
    sampled = sample_group(group, oldest_version=0)
    before = [sample.advantages for sample in sampled.samples]
    slices = sum(1 for _ in whiten(sampled.samples))
    assert slices >= 5
    assert [sample.advantages for sample in sampled.samples] == before
