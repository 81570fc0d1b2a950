from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tailrace.records import PayloadRef
from tailrace.replay.synthetic import SyntheticLoad, synthetic_groups

SMALL = SyntheticLoad(rollouts=5, turns=3, context_tokens=4, completion_tokens=6, group_size=2)


def test_a_load_is_as_large_as_asked_and_the_same_every_time() -> None:
    groups, again = synthetic_groups(SMALL), synthetic_groups(SMALL)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [len(group.rollouts) for group in groups] == [2, 2, 1]
    assert sum(rollout.num_tokens for rollout in rollouts) == SMALL.num_tokens == 150
    assert {rollout.turns for rollout in rollouts} == {3}
    assert all(group.rewards for group in groups)
    for first, second in zip(groups, again, strict=True):
        branches = zip(first.rollouts, second.rollouts, strict=True)
        assert all(np.array_equal(one.branches[0].token_ids, two.branches[0].token_ids) for one, two in branches)


def test_every_position_but_the_last_has_its_experts_once() -> None:
    shapes: list[tuple[int, ...]] = []

    def put(array: np.ndarray[Any, np.dtype[np.uint8]]) -> PayloadRef:
        shapes.append(array.shape)
        return PayloadRef(f"memory:{len(shapes)}", "uint8", array.shape)

    load = replace(SMALL, experts_bytes=150 * 16)
    groups = synthetic_groups(load, put)
    branch = groups[0].rollouts[0].branches[0]
    assert shapes[:3] == [(9, 2, 8), (10, 2, 8), (10, 2, 8)]
    assert [(chunk.start, chunk.end, chunk.ref is None) for chunk in branch.payload_chunks] == [
        (0, 9, False),
        (9, 19, False),
        (19, 29, False),
        (29, 30, True),
    ]
    assert len(shapes) == 15
