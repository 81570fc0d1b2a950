"""Scoring inside the scheduler: it overlaps with generation, and whatever it does every rollout is accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ScoringFailed
from tailrace.records import Group, GroupId, Rollout, RolloutId, TerminalState
from tailrace.scheduling.groups import sort_scored
from tests.scheduling.world import environment, make_rollout, make_world


def spread(number: int) -> float:
    return float(number % 2)


async def test_groups_are_scored_while_rollouts_of_others_still_run() -> None:
    world = make_world(spread, rows=16, pauses=lambda number: number % 7)
    live = []

    async def score(group: Group) -> list[Group]:
        live.append(world.runner.live)
        return [group]

    world.runner.score = score  # type: ignore[method-assign]
    await world.run()
    assert len(live) == 16
    assert max(live[:4]) > 0


@pytest.mark.parametrize("how", ["in place", "copy", "none", "failed", "unscored", "one unscored"])
async def test_whatever_scoring_does_to_a_group_the_ledger_balances(how: str) -> None:
    world = make_world(spread, rows=8, max_staleness=9)

    async def score(group: Group) -> list[Group]:
        if group.task.index % 2:
            return [group]
        match how:
            case "in place":
                del group.rollouts[1:3]
            case "copy":
                return [replace(group, rollouts=group.rollouts[:3])]
            case "none":
                return []
            case "failed":
                group.rollouts.pop()
                raise ScoringFailed("no verdict")
            case "unscored":
                for rollout in group.rollouts:
                    rollout.reward = None
            case "one unscored":
                group.rollouts[0].reward = None
        return [group]

    world.runner.score = score  # type: ignore[method-assign]
    await world.run()
    ledger = world.scheduler.ledger
    ended = {"in place": 8, "copy": 4, "none": 16, "failed": 16, "unscored": 16, "one unscored": 4}[how]
    reason = {"failed": "scoring_failed", "unscored": "unscored", "one unscored": "unscored"}.get(how, "score_dropped")
    state = TerminalState.FAILED if how == "failed" else TerminalState.FILTERED
    assert ledger.reasons(state) == {reason: ended}
    assert ledger.total(TerminalState.TRAINED) == 32 - ended
    assert ledger.in_flight == 0


@given(st.lists(st.sampled_from(["scored", "unscored", "dropped"]), max_size=8), st.integers(0, 8))
def test_every_member_is_in_a_group_unscored_or_dropped(fates: list[str], cut: int) -> None:
    task, group_id = environment().train_task(0), GroupId("0")
    members: list[Rollout] = []
    for number, fate in enumerate(fates):
        members.append(make_rollout(task, group_id, RolloutId(str(number)), reward=1.0))
        if fate == "unscored":
            members[-1].reward = None
    back = [rollout for rollout, fate in zip(members, fates, strict=True) if fate != "dropped"]
    groups = [Group(group_id, task, part, [float(one.rollout_id) for one in part]) for part in (back[:cut], back[cut:])]
    scored = sort_scored(members, groups)
    kept = [rollout for group in scored.groups for rollout in group.rollouts]
    sorted_into = {"scored": kept, "unscored": scored.unscored, "dropped": scored.dropped}
    for fate, rollouts in sorted_into.items():
        assert rollouts == [rollout for rollout, own in zip(members, fates, strict=True) if own == fate]
    assert all(group.rollouts for group in scored.groups)
    assert all(group.advantages == [float(one.rollout_id) for one in group.rollouts] for group in scored.groups)
