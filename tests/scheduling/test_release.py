"""Rollouts that are trained on before their group is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.records import RolloutId, TerminalState
from tailrace.scheduling.release import EarlyRelease
from tailrace.simulation import simulate
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import World, decoded, make_world
from tests.simulation.plans import small_plan

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), max_size=12)


def released(rewards: list[float], min_known_siblings: int) -> list[tuple[int, int, float]]:
    """(how many were known, number, advantage) of every rollout that is released."""
    release = EarlyRelease(min_known_siblings)
    given = [
        (known, number, advantage)
        for known, reward in enumerate(rewards, 1)
        for number, advantage in release.learn(reward)
    ]
    return given + [(len(rewards), number, advantage) for number, advantage in release.close()]


@given(REWARDS, st.integers(1, 6))
def test_every_rollout_is_released_once_or_has_only_equals(rewards: list[float], min_known: int) -> None:
    numbers = [number for _, number, _ in released(rewards, min_known)]
    assert len(numbers) == len(set(numbers))
    assert sorted(numbers) == (list(range(len(rewards))) if len(set(rewards)) > 1 else [])


@given(REWARDS, st.integers(1, 6))
def test_an_advantage_is_the_reward_less_the_mean_of_the_siblings_known_then(
    rewards: list[float], min_known: int
) -> None:
    for known, number, advantage in released(rewards, min_known):
        siblings = [reward for index, reward in enumerate(rewards[:known]) if index != number]
        assert advantage == pytest.approx(rewards[number] - sum(siblings) / len(siblings))


@given(REWARDS, REWARDS, st.integers(1, 6))
def test_nothing_that_comes_later_changes_what_was_released(
    rewards: list[float], more: list[float], min_known: int
) -> None:
    before = EarlyRelease(min_known)
    given_out = [before.learn(reward) for reward in rewards]
    after = EarlyRelease(min_known)
    assert [after.learn(reward) for reward in rewards + more][: len(rewards)] == given_out


@given(REWARDS, st.integers(1, 6))
def test_nothing_is_released_among_too_few_or_equals(rewards: list[float], min_known: int) -> None:
    release = EarlyRelease(min_known)
    for known, reward in enumerate(rewards, 1):
        if release.learn(reward):
            assert known > min_known
            assert len(set(rewards[:known])) > 1


@given(REWARDS, st.integers(2, 8), st.integers(0, 8), st.integers(1, 3))
def test_a_group_that_expires_waits_for_fewer_siblings_from_then_on(
    rewards: list[float], min_known: int, expires_after: int, least: int
) -> None:
    release, seen, numbers = EarlyRelease(min_known, min(least, min_known)), 0, []
    for known, reward in enumerate(rewards, 1):
        given_out = release.learn(reward)
        if known == expires_after:
            given_out = [*given_out, *release.expire()]
        seen, numbers = known, [*numbers, *(number for number, _ in given_out)]
        enough = min(least, min_known) if expires_after and known >= expires_after else min_known
        assert not given_out or (known > enough and len(set(rewards[:known])) > 1)
        assert not release.waiting or known <= enough or len(set(rewards[:known])) == 1
    assert len(numbers) == len(set(numbers)) <= seen


async def test_a_finished_rollout_is_trained_on_before_it_would_be_too_old() -> None:
    world = make_world(
        lambda number: float(number % 2),
        rows=16,
        group_release="early",
        min_known_siblings=3,
        max_staleness=2,
        pauses=lambda number: 400 if number in (1, 6) else 2,
    )
    await world.run()
    stale = world.scheduler.ledger.reasons(TerminalState.FILTERED).get("stale", 0)
    assert stale == 0
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 64


async def test_a_group_is_trained_in_parts_and_wholly() -> None:
    slow = {3, 10, 17}
    world = make_world(
        lambda number: float(number % 2),
        rows=12,
        group_release="early",
        max_staleness=4,
        pauses=lambda number: 200 if number in slow else 2,
    )
    await world.run()
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 48
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8] * 6
    batches_of = Counter(
        group_id
        for formed in world.recorder.formed
        for group_id in {str(group.group.group_id) for group in formed.groups}
    )
    assert max(batches_of.values()) > 1


async def test_a_group_of_equal_rewards_waits_and_is_filtered() -> None:
    world = make_world(lambda number: 1.0 if number < 4 else float(number % 2), rows=6, group_release="early")
    await world.run()
    assert world.scheduler.ledger.reasons(TerminalState.FILTERED) == {"zero_spread": 4}
    assert world.recorder.filtered["zero_spread"] == 1


async def test_a_rollout_that_could_not_be_scored_is_put_aside_and_its_siblings_are_trained_on() -> None:
    world = make_world(
        lambda number: "unscored" if number % 4 == 0 else float(number % 2),
        rows=8,
        max_staleness=9,
        group_release="early",
    )
    await world.run()
    ledger = world.scheduler.ledger
    assert ledger.reasons(TerminalState.FILTERED) == {"unscored": 8}
    assert (ledger.total(TerminalState.TRAINED), ledger.in_flight) == (24, 0)


async def test_a_later_failure_changes_no_advantage_that_was_used() -> None:
    world = make_world(
        lambda number: "timeout" if number == 3 else float(number % 2),
        rows=1,
        max_retries=0,
        group_release="early",
        min_known_siblings=1,
        pauses=lambda number: 10 * number,
    )
    await world.run()
    advantages = [advantage for part in world.recorder.parts for advantage in part.advantages or ()]
    assert advantages == [-1.0, 1.0, -0.5]
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 3
    assert world.scheduler.ledger.reasons(TerminalState.FAILED) == {"timeout": 1}


async def test_resuming_starts_no_group_over_of_which_a_part_is_trained() -> None:
    world = make_world(
        lambda number: float(number % 2),
        rows=16,
        group_release="early",
        max_staleness=4,
        pauses=lambda number: 50 if number % 7 == 0 else 1,
    )
    await world.run()
    lost: list[int] = []
    for kept in range(1, len(world.recorder.formed)):
        first = world.recorder.formed[:kept]
        resumed = make_world(lambda number: float(number % 2), rows=16, step=kept, state=world.states[kept])
        await resumed.run()
        before, after = (
            {group.group.task.index for formed in batches for group in formed.groups}
            for batches in (first, resumed.recorder.formed)
        )
        assert not before & after
        assert before | after == set(range(16))
        trained = sum(formed.batch.summary.num_rollouts for formed in [*first, *resumed.recorder.formed])
        lost.append(16 * 4 - trained)
        resumed.scheduler.ledger.check()
    assert min(lost) >= 0
    assert max(lost) > 0  # the rest of a group that was trained in part


@pytest.mark.parametrize("silent", [(), (3,), (3, 4)], ids=["two-are-left", "one-is-left", "none-is-left"])
def test_a_task_ends_with_its_first_part_that_is_trained_or_with_the_last_that_is_not(silent: Sequence[int]) -> None:
    """Of the first group three rollouts of equal rewards wait for the fourth, and are too old once it comes."""
    rows = 24

    async def trained() -> World:
        world = make_world(
            lambda number: 1.0 if number < 3 else float(number % 2) if number > 4 else 0.0,
            rows=rows,
            group_size=5,
            max_staleness=2,
            max_running=10,
            group_release="early",
            pauses=lambda number: {3: 45, 4: 85}.get(number, 1),
        )
        world.runner.pause_s, world.train_s = 1.0, 10.0
        world.runner.is_silent = lambda number: number in silent
        await world.run()
        return world

    world = run_in_virtual_time(trained())
    first = next(part for part in world.recorder.parts if part.group_id.endswith("#1"))
    ends = [world.recorder.outcomes[RolloutId(f"{first.group_id}.{number}.0")] for number in range(5)]
    assert [end.reason for end in ends[:3]] == ["stale"] * 3
    steps = [end.step for end in ends if end.state is TerminalState.TRAINED]
    assert len(steps) == 2 - len(silent)
    states = {step: decoded(state) for step, state in sorted(world.states.items())}
    toy = states[max(states)].mix.environments["toy"]
    assert (toy.ended, toy.trained) == (rows, rows - (not steps))
    listed = [step for step, state in states.items() if first.task.index in {key.index for key in state.outstanding}]
    assert listed == [step for step in states if step < min(steps, default=len(listed) + 1)]


def test_early_release_makes_far_fewer_tokens_too_old_and_wastes_none() -> None:
    def too_old(release: str) -> float:
        load = {"group_size": 8, "lengths": {"mean_log": 4.5, "sigma": 1.2, "task_sigma": 0.5, "cap": 2048}}
        scheduling = {"batch_size": 32, "group_release": release, "max_staleness": 2}
        run = simulate(small_plan(steps=30, load=load, scheduling=scheduling))
        assert run.staleness_max <= 2
        assert (run.wasted_share == 0) == (release == "early")
        return run.masked_share + run.wasted_share

    assert too_old("early") < 0.5 * too_old("together")
