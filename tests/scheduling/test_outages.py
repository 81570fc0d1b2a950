"""What an outage of what environments and judges call costs: some rollouts, and the run only where it does not end."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable

import pytest

from tailrace.errors import JudgeFailed, NothingLeft, ScoringFailed, TrainingError
from tailrace.records import Group, GroupId, Reward, Rollout, RolloutId, Task, TerminalState
from tailrace.scheduling import TaskSource, TaskStream
from tailrace.scheduling.backoff import FAILURES_IN_A_ROW, LONGEST_PAUSE_S, Backoff
from tailrace.scheduling.mistakes import TASKS, Mistakes
from tailrace.scheduling.tasks import TaskKey
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import FAILURES, World, environment, make_world


def spread(number: int) -> float:
    return float(number % 2)


def failing_until(ends_s: float, **settings: object) -> World:
    """Every rollout fails at once until `ends_s`; each that works takes a second."""

    def fate(number: int) -> str | float:
        return "environment_failed" if asyncio.get_running_loop().time() < ends_s else spread(number)

    world = make_world(fate, rows=64, pauses=lambda number: 1, **settings)  # type: ignore[arg-type]
    world.runner.pause_s = 1.0
    return world


def test_pauses_begin_after_failures_in_a_row_double_up_to_a_limit_and_end_with_a_success() -> None:
    backoff, now_s, pauses = Backoff(), 0.0, []
    for _ in range(FAILURES_IN_A_ROW - 1):
        assert backoff.failed("a", "rollouts", now_s=now_s) == 0.0
    for _ in range(7):
        pauses.append(backoff.failed("a", "rollouts", now_s=now_s))
        assert backoff.failed("a", "rollouts", now_s=now_s + pauses[-1] / 2) == 0.0  # it pauses already
        now_s += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    backoff.came_back("a", "rollouts", now_s=now_s)
    assert (backoff.paused, backoff.failed("a", "rollouts", now_s=now_s)) == ([], 0.0)


def test_rollouts_that_come_back_do_not_end_the_pause_of_scores() -> None:
    backoff = Backoff()
    for _ in range(FAILURES_IN_A_ROW):
        backoff.failed("a", "scores", now_s=0.0)
        backoff.came_back("a", "rollouts", now_s=0.0)
    assert (backoff.paused, backoff.pause_left_s("a", now_s=0.25), backoff.pause_left_s("b", now_s=0.0)) == (
        *(["a"], 0.75, 0.0),
    )


def test_tasks_are_drawn_without_the_environments_that_pause_and_interrupted_ones_of_theirs_wait() -> None:
    stream = TaskStream([TaskSource(environment("a")), TaskSource(environment("b"))], seed=0, max_epochs=1)
    interrupted = stream.draw() or pytest.fail("there are tasks")
    stream.restart(interrupted, is_stale=False)
    others = [stream.draw(without=[interrupted.environment]) for _ in range(9)]
    assert [key is None or key.environment != interrupted.environment for key in others] == [True] * 9
    assert others[8] is None  # the other one's tasks are all drawn
    assert stream.draw() == interrupted


def test_after_a_pause_one_group_tries_and_all_others_once_it_came_back() -> None:
    async def run() -> None:
        tried: dict[float, set[GroupId]] = {}
        world = failing_until(10.0, max_running=32, max_staleness=8, max_retries=1)
        play = world.runner.run

        async def counted(task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
            tried.setdefault(asyncio.get_running_loop().time(), set()).add(group_id)
            return await play(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)

        world.runner.run = counted  # type: ignore[method-assign]
        await world.run()
        assert {at_s: len(groups) for at_s, groups in tried.items() if 1.0 < at_s < 10.0} == {4.0: 1, 9.0: 1}
        assert len(tried[0.0]) == 8
        assert len(tried[10.0]) >= 5

    run_in_virtual_time(run())


def test_other_environments_have_the_slots_of_what_waits_until_it_may_be_tried_again() -> None:
    async def run() -> None:
        loop, done = asyncio.get_running_loop(), Counter[str]()
        world = make_world(
            spread, environments=("shop", "sums"), rows=500, group_size=8, max_running=32, max_staleness=8
        )
        play = world.runner.run

        async def called(task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
            for _ in range(20 if task.environment == "shop" else 1):
                if task.environment == "shop" and 60.0 <= loop.time() < 180.0:
                    raise FAILURES["environment_failed"]("scripted")
                await asyncio.sleep(1.0)
            done[task.environment] += 1
            return await play(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)

        world.runner.run = called  # type: ignore[method-assign]
        running = asyncio.create_task(world.run())
        await asyncio.sleep(65.0)
        assert world.scheduler.statistics.running >= 32
        waited = done["sums"]
        await asyncio.sleep(60.0)
        assert done["sums"] - waited >= 60 * 30
        await asyncio.sleep(120.0)
        assert done["shop"] > 32
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_in_virtual_time(run())


@pytest.mark.parametrize("max_retries", [0, 1], ids=["a new group", "one with something to try again"])
def test_rollouts_that_began_before_an_outage_keep_no_group_from_trying(max_retries: int) -> None:
    """One of each group takes a quarter of an hour; its siblings have failed for the last time long before."""

    async def run() -> None:
        tried, longest = list[float](), range(0, 32, 4)

        def fate(number: int) -> str | float:
            tried.append(asyncio.get_running_loop().time())
            return "environment_failed" if tried[-1] < 6.5 else spread(number)

        world = make_world(
            fate,
            rows=64,
            max_running=32,
            max_staleness=8,
            pauses=lambda number: 900 if number in longest else 1,
            max_retries=max_retries,
        )
        world.runner.pause_s = 1.0
        await world.run()
        assert len([at_s for at_s in tried if 6.5 <= at_s < 60.0]) > 64

    run_in_virtual_time(run())


def test_groups_that_began_before_a_judge_was_away_keep_no_group_from_trying() -> None:
    async def run() -> None:
        world = make_world(
            spread, rows=64, max_running=40, max_staleness=8, pauses=lambda number: 900 if number in (0, 37) else 1
        )
        world.runner.pause_s = 1.0
        score, scored = world.runner.score, list[float]()

        async def judged(group: Group) -> list[Group]:
            if (now_s := asyncio.get_running_loop().time()) < 2.5:
                raise ScoringFailed("the judge is away")
            scored.append(now_s)
            return await score(group)

        world.runner.score = judged  # type: ignore[method-assign]
        await world.run()
        assert len([at_s for at_s in scored if at_s < 60.0]) > 16

    run_in_virtual_time(run())


def test_an_outage_of_half_a_minute_costs_some_rollouts_and_not_the_run() -> None:
    async def run() -> None:
        world = failing_until(30.0, max_running=32, max_barren_batches=10)
        await world.run()
        ledger = world.scheduler.ledger
        assert ledger.total(TerminalState.FAILED) < 150
        assert ledger.total(TerminalState.TRAINED) >= 4 * (64 - 16)
        assert world.scheduler.statistics.paused == []
        assert world.scheduler.statistics.waited_s["environments_fail"] > 10.0  # type: ignore[index]

    run_in_virtual_time(run())


def shop_away_and_sums_solved(ends_s: float, **settings: object) -> World:
    """`shop` has something to teach, and is away from the 20th second to `ends_s`; all of `sums` earn the highest."""
    world = make_world(spread, environments=("shop", "sums"), pauses=lambda number: 1, **settings)  # type: ignore[arg-type]
    world.runner.pause_s = 2.0
    play = world.runner.run

    async def called(task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        now_s, number = asyncio.get_running_loop().time(), int(rollout_id.split(".")[-2])
        if task.environment == "shop" and 20.0 <= now_s < ends_s:
            raise FAILURES["environment_failed"]("the shop is away")
        rollout = await play(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)
        rollout.reward = Reward(spread(number) if task.environment == "shop" or now_s < 10.0 else 1.0)
        return rollout

    world.runner.run = called  # type: ignore[method-assign]
    return world


def test_an_outage_of_the_one_environment_that_has_something_to_teach_costs_some_rollouts_and_not_the_run() -> None:
    async def run() -> None:
        world = shop_away_and_sums_solved(110.0, rows=160)
        await world.run()
        trained = Counter[str]()
        for task_id, rollouts in world.recorder.trained_by_task.items():
            trained[task_id.partition("/")[0]] += rollouts
        assert trained["shop"] >= 4 * (160 - 12)
        assert 0 < trained["sums"] < 4 * 16

    run_in_virtual_time(run())


def test_an_outage_without_end_of_the_one_environment_that_has_something_to_teach_fails_the_run_and_names_it() -> None:
    async def run() -> None:
        world = shop_away_and_sums_solved(1e9, epochs=None, max_failing_s=100.0)
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = (
            r"^environment 'shop' has failed for 1\d\d s \(scheduling\.max_failing_s\), and the last 80 rollouts held "
            r"nothing to train on: (\d+) of the last \1 scored rollouts earned 1, the highest reward there was"
        )
        assert caught.group_contains(TrainingError, match=says, depth=None)
        assert not caught.group_contains(NothingLeft, depth=None)
        assert 120.0 < asyncio.get_running_loop().time() < 180.0

    run_in_virtual_time(run())


def test_code_that_never_worked_ends_the_run_at_its_first_tasks() -> None:
    async def run() -> None:
        world = make_world(lambda number: "mistake", rows=64, max_running=16)
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = "environment 'toy' does not work: the rollouts of its first 4 tasks all failed, .* newest: scripted"
        assert caught.group_contains(TrainingError, match=says, depth=None)
        assert asyncio.get_running_loop().time() < 1.0
        world.scheduler.finish("over")
        assert world.scheduler.ledger.total(TerminalState.FAILED) >= 4

    run_in_virtual_time(run())


def test_code_that_never_scored_a_group_ends_the_run_at_its_first_tasks() -> None:
    async def run() -> None:
        world = make_world(spread, rows=64)

        async def wrong(group: Group) -> list[Group]:
            error = ScoringFailed("KeyError: 'qestion'")
            error.is_mistake = True
            raise error

        world.runner.score = wrong  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = "the scores of its first 4 tasks all failed, .* newest: KeyError: 'qestion'"
        assert caught.group_contains(TrainingError, match=says, depth=None)

    run_in_virtual_time(run())


@pytest.mark.parametrize("before", [1.0, "timeout"], ids=["worked before", "failed by other errors too"])
def test_code_that_may_be_right_is_waited_for_whatever_it_raises(before: float | str) -> None:
    async def run() -> None:
        def fate(number: int) -> str | float:
            is_away = number > 0 and asyncio.get_running_loop().time() < 30.0
            return "mistake" if is_away else spread(number) if number else before

        world = make_world(fate, rows=64, max_running=32, pauses=lambda number: min(number, 1))
        world.runner.pause_s = 1.0
        await world.run()
        assert world.scheduler.ledger.total(TerminalState.TRAINED) >= 4 * (64 - 16)

    run_in_virtual_time(run())


def test_code_that_worked_before_the_run_was_resumed_may_be_right() -> None:
    mistakes, wrong = Mistakes(lambda environment: True), FAILURES["mistake"]("KeyError: 'choices'")
    for key in [TaskKey("toy", 0, index) for index in range(2 * TASKS)]:
        mistakes.began(key)
        mistakes.failed(key, "rollouts", wrong)


def test_rows_that_fail_while_the_first_is_still_played_end_no_run() -> None:
    """Malformed rows among good ones always fail first."""

    async def run() -> None:
        def fate(number: int) -> str | float:
            return spread(number) if number < 4 or asyncio.get_running_loop().time() > 30.0 else "mistake"

        world = make_world(fate, rows=64, max_running=64, max_staleness=8, pauses=lambda number: int(number < 4))
        world.runner.pause_s = 20.0
        await world.run()
        assert world.scheduler.ledger.total(TerminalState.TRAINED) >= 4 * 16

    run_in_virtual_time(run())


def test_one_malformed_row_ends_no_run() -> None:
    async def run() -> None:
        world = make_world(lambda number: "mistake" if number < 8 else spread(number), rows=64, max_running=4)
        await world.run()
        assert world.scheduler.ledger.total(TerminalState.TRAINED) >= 4 * 62

    run_in_virtual_time(run())


def test_a_lost_worker_pauses_nothing_though_it_took_many_rollouts_with_it() -> None:
    async def run() -> None:
        lost = range(2 * FAILURES_IN_A_ROW)
        world = make_world(lambda number: "worker_lost" if number in lost else spread(number), rows=64, max_running=16)
        await world.run()
        assert world.scheduler.ledger.reasons(TerminalState.FAILED) == {"worker_lost": len(lost)}
        assert world.scheduler.statistics.waited_s.get("environments_fail", 0.0) == 0.0  # type: ignore[call-overload]
        assert world.scheduler.ledger.total(TerminalState.TRAINED) >= 4 * 64 - len(lost)

    run_in_virtual_time(run())


def test_an_outage_without_end_ends_the_run_after_its_time_and_names_the_reason() -> None:
    async def run() -> None:
        world = failing_until(1e9, max_failing_s=100.0)
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        assert caught.group_contains(TrainingError, match=r"max_failing_s\).*newest failure: scripted", depth=None)
        assert 100.0 <= asyncio.get_running_loop().time() <= 100.0 + 2 * LONGEST_PAUSE_S
        assert world.scheduler.ledger.total(TerminalState.FAILED) < 100

    run_in_virtual_time(run())


def test_a_judge_that_is_away_for_half_a_minute_does_not_end_the_run() -> None:
    async def run() -> None:
        world = make_world(spread, rows=64, max_barren_batches=2)
        score = world.runner.score

        async def judged(group: Group) -> list[Group]:
            if asyncio.get_running_loop().time() < 30.0:
                raise ScoringFailed("the judge is away")
            return await score(group)

        world.runner.score = judged  # type: ignore[method-assign]
        await world.run()
        failed = world.scheduler.ledger.reasons(TerminalState.FAILED)
        assert failed.keys() == {"scoring_failed"}
        assert failed["scoring_failed"] < 100

    run_in_virtual_time(run())


def test_a_judge_that_stays_away_ends_the_run_though_rollouts_come_back() -> None:
    async def run() -> None:
        world = make_world(spread, rows=64, epochs=None, max_failing_s=100.0)
        world.runner.pause_s = 1.0

        async def away(group: Group) -> list[Group]:
            raise ScoringFailed("the judge is away")

        world.runner.score = away  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = r"for 1\d\d s \(scheduling.max_failing_s\) groups failed and none was scored.*the judge is away"
        assert caught.group_contains(TrainingError, match=says, depth=None)

    run_in_virtual_time(run())


def test_two_groups_that_fail_long_after_each_other_end_no_run_whose_other_rollouts_come_back() -> None:
    failing = {range(8, 12): 1, range(20, 24): 6}  # numbers of rollouts, and after how many hundred seconds

    def pauses(number: int) -> int:
        return next((pause for numbers, pause in failing.items() if number in numbers), 3 + number % 6)

    async def run() -> None:
        fails = {number for numbers in failing for number in numbers}
        world = make_world(
            lambda number: "timeout" if number in fails else spread(number),
            rows=16,
            pauses=pauses,
            max_running=64,
            max_retries=0,
            max_failing_s=300.0,
        )
        world.runner.pause_s = 100.0
        await world.run()
        assert world.scheduler.ledger.reasons(TerminalState.FAILED) == {"timeout": 8}
        assert world.scheduler.ledger.total(TerminalState.TRAINED) == 64 - 8

    run_in_virtual_time(run())


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda number: 0.0, "all rewards are 0: the task is too hard"),
        (lambda number: 1.0, "all rewards are 1: the task is too easy"),
        (lambda number: 0.25, "all rewards are 0.25: the reward does not tell replies apart"),
        (lambda number: number // 16 / 7, r"rewards, from 0 to .* are equal inside each group"),
    ],
)
def test_a_run_in_which_rewards_never_differ_ends_and_says_which(reward: object, says: str) -> None:
    async def run() -> None:
        world = make_world(reward, rows=8, epochs=None, max_running=16, max_barren_batches=4, pauses=lambda number: 0)  # type: ignore[arg-type]
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        assert caught.group_contains(TrainingError, match=says, depth=None)
        assert caught.group_contains(TrainingError, match=r"Replies: '.*' \(task toy/train/\d, reward", depth=None)

    run_in_virtual_time(run())


def test_a_run_in_which_all_that_was_ready_has_become_too_old_ends_and_says_so() -> None:
    async def run() -> None:
        world = make_world(spread, rows=8, epochs=None, max_barren_batches=2)
        world.runner.version = lambda: 0  # whatever weights are installed
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = r"nothing to train on in the last 16 rollouts that were ready .* older than scheduling\.max_staleness"
        assert caught.group_contains(TrainingError, match=says, depth=None)
        assert world.scheduler.ledger.reasons(TerminalState.FILTERED).keys() == {"stale"}

    run_in_virtual_time(run())


def after_learning(last: Callable[[int], float]) -> Callable[[int], float]:
    """Rewards up to 1 that differ in the first 64 rollouts; then by the number of the group, the same inside it."""
    return lambda number: spread(number) if number < 64 else last(number // 4)


async def end_of(fate: Callable[[int], float], *, step: int = 0, state: bytes = b"") -> tuple[Exception, World]:
    """How a run without an end of tasks or steps ends."""
    world = make_world(fate, rows=8, epochs=None, pauses=lambda number: 0, step=step, state=state)
    with pytest.raises(ExceptionGroup) as caught:
        await world.run()
    error: Exception = caught.value
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    return error, world


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (lambda group: 2.0, "converged: 80 of the last 80 scored rollouts earned 2, the highest reward there was"),
        (lambda group: 1.0, "converged: 80 of the last 80 scored rollouts earned 1, the highest"),
        (
            lambda group: 0.9 + group % 3 / 20,
            "converged: 80 of the last 80 scored rollouts earned the highest reward there was, or",
        ),
        (
            lambda group: 1.0 if group % 20 else 0.5,
            "converged: 76 of the last 80 scored rollouts earned 1, the highest",
        ),
    ],
)
def test_a_run_in_which_nearly_every_reward_is_the_highest_there_was_has_converged(
    last: Callable[[int], float], says: str
) -> None:
    error, world = run_in_virtual_time(end_of(after_learning(last)))
    assert type(error) is NothingLeft
    assert str(error).startswith(says)
    assert world.scheduler.ledger.total(TerminalState.TRAINED) >= 48


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (lambda group: 0.5, "all rewards are 0.5, and none of the 80 rollouts earned the"),
        (lambda group: 0.0, "all rewards are 0, and none of the 80 rollouts earned the"),
        (
            lambda group: group % 4 / 3,
            "rewards, from 0 to 1, are equal inside each group, and 20 of the 80 rollouts earned the",
        ),
    ],
)
def test_a_policy_that_settled_below_the_highest_reward_fails_and_is_told_so(
    last: Callable[[int], float], says: str
) -> None:
    error, _ = run_in_virtual_time(end_of(after_learning(last)))
    assert type(error) is TrainingError
    assert (
        f"held nothing to train on: {says} highest reward there was, or hardly less: the policy has settled on one way"
        in str(error)
    )
    assert "Replies: '" in str(error)
    assert re.search(r"\. So far filtered: \d+ zero_spread$", str(error))  # nothing failed, so the log tells nothing


def test_groups_that_could_not_be_scored_do_not_hide_that_all_others_are_solved() -> None:
    async def run() -> Exception:
        world = make_world(after_learning(lambda group: 1.0), rows=8, epochs=None, pauses=lambda number: 0)
        score, scored = world.runner.score, itertools.count()

        async def judged(group: Group) -> list[Group]:
            if (number := next(scored)) > 16 and number % 2:
                raise JudgeFailed("no verdict")
            return await score(group)

        world.runner.score = judged  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        return caught.value

    error = run_in_virtual_time(run())
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    assert type(error) is NothingLeft
    assert re.match(r"converged: (\d+) of the last \1 scored rollouts earned 1, the highest", str(error))


def test_one_penalty_among_the_first_rewards_makes_no_other_reward_high() -> None:
    learning = after_learning(lambda group: 0.5)
    error, _ = run_in_virtual_time(end_of(lambda number: -100.0 if number == 0 else learning(number)))
    assert type(error) is TrainingError
    assert "none of the 80 rollouts earned the highest reward" in str(error)


def test_a_resumed_run_knows_what_was_learned_before() -> None:
    _, world = run_in_virtual_time(end_of(after_learning(lambda group: 0.5)))
    step = max(world.states)
    error, _ = run_in_virtual_time(end_of(lambda number: 1.0, step=step, state=world.states[step]))
    assert type(error) is NothingLeft


def test_a_run_that_trained_nothing_has_not_converged() -> None:
    error, world = run_in_virtual_time(end_of(lambda number: spread(number) if number < 4 else 1.0))
    assert type(error) is TrainingError
    assert "all rewards are 1: the task is too easy" in str(error)
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 0
