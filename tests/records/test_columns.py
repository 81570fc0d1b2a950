"""Columns with a name of their own: from a branch through a batch to the rows of a rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batching import Packing, compute_advantages, form_batch, sample_group
from tailrace.batching.slices import drained
from tailrace.errors import TrainingError
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    RolloutId,
    Task,
    TaskId,
    TrainingSample,
)
from tests.scheduling.world import make_rollout

TASK = Task(task_id=TaskId("toy/0"), environment="toy", index=0, row={})


def branch_of(num_tokens: int) -> Branch:
    branch = Branch()
    branch.extend_context(list(range(num_tokens)))
    return branch


def test_tokens_that_nothing_is_set_for_are_0_whenever_they_come() -> None:
    branch = branch_of(3)
    assert not branch.columns
    branch.set_column("weights", [0.5], start=2)
    branch.extend_context([7, 8])
    branch.set_column("weights", np.array([2.0]), start=4)
    branch.set_column("top", [[1, 2]], start=1)
    assert branch.columns["weights"].tolist() == [0, 0, 0.5, 0, 2]
    assert branch.columns["top"].tolist() == [[0, 0], [1, 2]]
    assert {str(column.dtype) for column in branch.columns.values()} == {"float32", "int32"}
    with pytest.raises(ValueError, match="read-only"):
        branch.columns["weights"][0] = 1


@pytest.mark.parametrize("name", ["reference_kl_weights", "distillation_weights"])
def test_weights_that_all_sampled_tokens_have_are_1_where_nothing_is_set(name: str) -> None:
    group = group_of([3, 4, 2], {})
    (first, second, third) = (rollout.branches[0] for rollout in group.rollouts)
    first.set_column(name, [0, 2], start=first.num_tokens - 2)
    first.set_column(name, [0.5], start=first.num_tokens - 3)
    second.set_column(name, np.zeros(second.num_tokens), start=0)  # of its context, too, which bears nothing
    sampled = sample_group(group, oldest_version=0)
    planned = drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(30))).batch
    assert planned.summary.loss_tokens == 9
    assert planned.summary.weightless_tokens == {name: 1 + 4}
    assert planned.summary.weighted_tokens(name) == 4
    batch = planned.assembled()
    own = dict(zip(batch.origins.rollout_ids, np.split(batch.columns[name], batch.sample_offsets[1:-1]), strict=True))
    assert own["g.0"].tolist() == [1.0] * (first.num_tokens - 3) + [0.5, 0, 2]
    assert not own["g.1"].any()
    assert own["g.2"].tolist() == [1.0] * third.num_tokens


def test_tokens_that_are_too_old_are_not_in_the_denominator_of_weights() -> None:
    branch = branch_of(2)
    for version in (3, 4, 4):
        ids = np.zeros(2, np.int32)
        branch.extend_completion(Completion(ids, np.zeros(2, np.float32), ids + version, FinishReason.STOP))
    branch.set_column("reference_kl_weights", [0, 1, 0, 1, 1, 0], start=2)
    sample = TrainingSample(RolloutId("g.0"), GroupId("g"), 1.0, branch, 1.0, oldest_version=4)
    assert (branch.weightless("reference_kl_weights"), sample.weightless("reference_kl_weights")) == ({3: 1, 4: 2}, 2)


@pytest.mark.parametrize(
    ("name", "values", "start", "message"),
    [
        ("a b", [1.0], 0, "named as a variable"),
        ("weights", [1.0] * 4, 0, "tokens 0 to 4: the branch has 3"),
        ("weights", [1.0], -1, "tokens -1 to 0: the branch has 3"),
        ("weights", 1.0, 0, r"needs numbers, .* it was given float64 \[\]"),
        ("weights", ["x"], 0, "needs numbers"),
        ("weights", np.zeros((3, 0)), 0, "needs numbers"),
        ("ids", [2**31], 0, "that int32 cannot hold"),
        ("cross_entropy_weights", [1.0, 1.0], 0, "a weight for the first token, which nothing before it predicts"),
        ("cross_entropy_weights", [float("nan")], 1, "one finite number for each token"),
        ("cross_entropy_weights", [[1.0]], 1, "one finite number for each token"),
        ("reference_kl_weights", [float("inf")], 1, "one finite number for each token"),
        ("distillation_weights", [[1.0]], 1, "one finite number for each token"),
        ("known", [[1.0, 2.0]], 0, r"'known' is float32 \[num_tokens\], and cannot be float32 \[num_tokens, 2\] too"),
    ],
)
def test_what_is_no_column_of_the_branch_is_refused(name: str, values: object, start: int, message: str) -> None:
    branch = branch_of(3)
    branch.set_column("known", [1.0, 2.0])
    with pytest.raises(ValueError, match=message):
        branch.set_column(name, values, start=start)
    assert branch.columns["known"].tolist() == [1, 2]


def group_of(tokens: list[int], columns: dict[int, dict[str, object]]) -> Group:
    """Rollouts with so many sampled tokens each; `columns` of some of them."""
    group_id = GroupId("g")
    rollouts = [
        make_rollout(TASK, group_id, RolloutId(f"g.{number}"), reward=float(number), tokens=count, version=0)
        for number, count in enumerate(tokens)
    ]
    for number, own in columns.items():
        for name, values in own.items():
            rollouts[number].branches[0].set_column(name, values)
    group = Group(group_id, TASK, rollouts)
    compute_advantages(group, "mean")
    return group


@given(
    tokens=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    having=st.sets(st.integers(0, 5)),
    short=st.booleans(),
    num_ranks=st.integers(1, 3),
)
def test_each_rank_s_rows_have_the_columns_of_their_own_tokens(
    tokens: list[int], having: set[int], short: bool, num_ranks: int
) -> None:
    """The value of each token is told by its rollout and place, so that it is known wherever it comes to lie."""
    group = group_of(tokens, {})
    expected: dict[tuple[str, int], float] = {}
    for number in having & set(range(len(tokens))):
        (branch,) = group.rollouts[number].branches
        count = branch.num_tokens - short
        values = [100 * number + place + 0.5 for place in range(count)]
        branch.set_column("half", values)
        branch.set_column("pair", [[number, place] for place in range(count)])
        expected |= {(f"g.{number}", place): value for place, value in enumerate(values)}
    sampled = sample_group(group, oldest_version=0)
    planned = drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(20, num_ranks=num_ranks))).batch
    assert set(planned.columns) == ({"half", "pair"} if expected else set())
    plain = drained(form_batch([sample_group(group_of(tokens, {}), oldest_version=0)], step=1, trainer_version=0,
                               packing=Packing(20, num_ranks=num_ranks))).batch  # fmt: skip
    assert planned.num_bytes - plain.num_bytes == (12 * planned.num_tokens if expected else 0)
    seen = 0
    for rank in range(num_ranks):
        batch = planned.assembled(rank)
        assert batch.num_bytes == planned.part(rank).num_bytes
        for row in map(batch.row, range(batch.num_rows)):
            starts = np.cumsum(row.sample_lengths) - row.sample_lengths
            for rollout_id, start, length in zip(row.origins.rollout_ids, starts, row.sample_lengths, strict=True):
                if not planned.columns:
                    assert not row.columns
                    continue
                own = slice(start, start + length)
                wanted = [expected.get((rollout_id, place), 0.0) for place in range(length)]
                assert row.columns["half"][own].tolist() == wanted
                assert row.columns["pair"].shape == (len(row.token_ids), 2)
                known = [[int(value // 100), place] if value else [0, 0] for place, value in enumerate(wanted)]
                assert row.columns["pair"][own].tolist() == known
                seen += length
    assert not planned.columns or seen == planned.num_tokens


def test_whole_numbers_and_others_by_one_name_are_all_float32() -> None:
    columns = {0: {"gate": [1, 0, 1]}, 1: {"gate": [1.0, 0.5, 0.0]}, 2: {"gate": [0, 1, 1]}}
    sampled = sample_group(group_of([3, 3, 3], columns), oldest_version=0)
    batch = drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(20))).batch.assembled()
    assert batch.columns["gate"].dtype == np.float32
    found = dict(
        zip(batch.origins.rollout_ids, np.split(batch.columns["gate"], batch.sample_offsets[1:-1]), strict=True)
    )
    assert {name: own.tolist()[:3] for name, own in found.items()} == {
        "g.0": [1, 0, 1],
        "g.1": [1, 0.5, 0],
        "g.2": [0, 1, 1],
    }


def test_a_name_means_columns_of_one_width_in_a_batch() -> None:
    sampled = sample_group(group_of([3, 3], {0: {"top": [[1, 2]]}, 1: {"top": [[1, 2, 3]]}}), oldest_version=0)
    with pytest.raises(TrainingError, match=r"'top' is int32 \[num_tokens, 3\] in rollout g.1 and int32 .* 2\] in"):
        drained(form_batch([sampled], step=1, trainer_version=0, packing=Packing(20)))
