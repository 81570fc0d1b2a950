"""Gathering groups without a run, in virtual time: what is promised of order, overlap, failures and cancellation."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import tailrace
from tailrace.errors import EngineFailed, ErrorBudgetSpent, InvalidReward, ScoringFailed
from tailrace.records import Branch, Completion, FinishReason, Group, Json, Reward, Rollout
from tailrace.rollouts import ErrorBudget, gather_groups, stream_groups
from tailrace.rollouts.gathering import GroupBars
from tailrace.simulation.virtual_time import run_in_virtual_time

ScoreGroup = Callable[[Group], Awaitable[Group | list[Group] | None]]


def now() -> float:
    return asyncio.get_running_loop().time()


def place_of(rollout: Rollout) -> int:
    return int(rollout.rollout_id.rpartition(".")[2])


def rows(count: int) -> list[Mapping[str, Json]]:
    return [{"n": n} for n in range(count)]


async def one(rollout: Rollout) -> float:
    await asyncio.sleep(1)
    return 1.0


async def staggered(rollout: Rollout) -> float:
    """Places end in reverse order, and later groups later."""
    await asyncio.sleep(10 * rollout.task["n"] + 5 - place_of(rollout))
    return float(place_of(rollout))


class Played:
    """Rollouts that fail where they are told to, and know how many still run."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.running, self.started, self.cancelled = set(failing), 0, 0, 0

    async def __call__(self, rollout: Rollout) -> float:
        number, self.started = self.started, self.started + 1
        self.running += 1
        try:
            await asyncio.sleep(1 + number / 1000)
            if number in self.failing:
                raise ConnectionError(f"rollout {number}")
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.cancelled += 1
            await asyncio.sleep(0.5)  # whoever cleans up slowly is waited for
            raise
        finally:
            self.running -= 1
        return 1.0


# --- overlap and order -----------------------------------------------------------------------------------------------


def test_the_first_score_starts_before_the_last_rollout_ends() -> None:
    scored_s: list[float] = []

    async def score(group: Group) -> Group:
        scored_s.append(now())
        await asyncio.sleep(1)
        return group

    async def main() -> float:
        groups = await gather_groups(staggered, rows(3), group_size=2, score_group=score)
        assert max(rollout.ended_s for group in groups for rollout in group.rollouts) == 25
        return now()

    assert run_in_virtual_time(main()) == 26  # the last rollout and one score: the others cost nothing
    assert scored_s == [5, 15, 25]


def test_a_rollouts_own_reward_starts_when_that_rollout_ends() -> None:
    rewarded_s = {}

    async def reward(rollout: Rollout) -> float:
        rewarded_s[rollout.rollout_id] = now()
        return 0.5

    (group,) = run_in_virtual_time(gather_groups(staggered, rows(1), group_size=3, reward=reward))
    assert rewarded_s == {"0.0": 5, "0.1": 4, "0.2": 3}
    assert group.rewards == [0.5] * 3


def test_rollouts_keep_their_submission_order_whatever_ends_first_and_however_score_group_sorts() -> None:
    async def best_first(group: Group) -> Group:
        group.rollouts.sort(key=place_of, reverse=True)
        return group

    async def main() -> list[Group]:
        return await gather_groups(staggered, rows(2), group_size=3, score_group=best_first)

    for group in run_in_virtual_time(main()):
        assert [place_of(rollout) for rollout in group.rollouts] == [0, 1, 2]
        assert group.rewards == [0, 1, 2]


def test_gather_keeps_the_order_of_the_tasks_and_stream_that_of_completion() -> None:
    async def backwards(rollout: Rollout) -> float:
        await asyncio.sleep(10 - rollout.task["n"])
        return 1.0

    async def streamed() -> list[int]:
        return [group.index async for group in stream_groups(backwards, rows(4), group_size=2)]

    gathered = run_in_virtual_time(gather_groups(backwards, rows(4), group_size=2))
    assert [group.index for group in gathered] == [0, 1, 2, 3]
    assert run_in_virtual_time(streamed()) == [3, 2, 1, 0]


def test_a_streamed_group_is_there_at_once() -> None:
    async def main() -> list[float]:
        return [now() async for _ in stream_groups(staggered, rows(3), group_size=1)]

    assert run_in_virtual_time(main()) == [5, 15, 25]


@pytest.mark.parametrize(("allowed", "seconds", "seen"), [(3, 4, 3), (0, 2, 9), (None, 2, 9)])
def test_no_more_groups_are_scored_at_once_than_allowed(allowed: int | None, seconds: int, seen: int) -> None:
    live, most = 0, 0

    async def score(group: Group) -> Group:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(1)
        live -= 1
        return group

    async def main() -> float:
        await gather_groups(one, rows(9), group_size=2, score_group=score, score_concurrency=allowed)
        return now()

    assert (run_in_virtual_time(main()), most) == (seconds, seen)


def test_no_more_rollouts_are_played_at_once_than_allowed_and_tasks_are_drawn_one_ahead() -> None:
    live, most, drawn = 0, 0, []

    def tasks() -> Iterator[Mapping[str, Json]]:
        for n in range(6):
            drawn.append((n, now()))
            yield {"n": n}

    async def play(rollout: Rollout) -> float:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(1)
        live -= 1
        return 1.0

    groups = run_in_virtual_time(gather_groups(play, tasks(), group_size=2, rollout_concurrency=4))
    assert (len(groups), most) == (6, 4)
    assert drawn == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]


# --- what score_group returns ----------------------------------------------------------------------------------------


async def halves(group: Group) -> list[Group]:
    middle = len(group.rollouts) // 2
    return [
        replace(group, rollouts=group.rollouts[:middle]),
        Group(group.group_id, group.task, group.rollouts[middle:]),
    ]


def test_a_list_is_flattened_in_place_and_none_is_dropped_and_counted() -> None:
    async def score(group: Group) -> Group | list[Group] | None:
        return {0: group, 1: None}.get(group.index, await halves(group))

    counts = tailrace.GroupCounts()
    groups = run_in_virtual_time(gather_groups(one, rows(3), group_size=4, score_group=score, counts=counts))
    assert [(group.index, len(group.rollouts)) for group in groups] == [(0, 4), (2, 2), (2, 2)]
    assert (counts.groups_started, counts.groups_scored, counts.groups_dropped) == (3, 2, 1)
    assert counts.groups_over == 3


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda group: 1.0, "returned a float"),
        (lambda group: [group, "x"], "returned a list of Group"),
        (lambda group: [group, group], r"rollout 0\.0 twice"),
        (lambda group: replace(group, rollouts=[replace(group.rollouts[0], rollout_id="9.9")]), "not of this group"),
    ],
)
def test_anything_else_is_a_typed_error(returned: Callable[[Group], object], told: str) -> None:
    async def score(group: Group) -> object:
        return returned(group)

    with pytest.raises(ErrorBudgetSpent) as raised:
        run_in_virtual_time(gather_groups(one, rows(1), score_group=score))  # type: ignore[arg-type]
    (error,) = raised.value.exceptions
    assert isinstance(error, ScoringFailed)
    with pytest.raises(ScoringFailed, match=told):
        raise error


def test_a_group_without_rollouts_never_reaches_score_group() -> None:
    seen = []

    async def play(rollout: Rollout) -> float:
        if rollout.task["n"] == 1:
            raise ConnectionError
        return 1.0

    async def score(group: Group) -> Group:
        seen.append(group.index)
        return group

    counts = tailrace.GroupCounts()
    budget = ErrorBudget(max_count=8)
    groups = run_in_virtual_time(gather_groups(play, rows(3), score_group=score, rollout_errors=budget, counts=counts))
    assert [group.index for group in groups] == seen == [0, 2]
    assert counts.groups_empty == 1


def filled(rollout: Rollout) -> Rollout:
    """With everything that must survive scoring."""
    branch = Branch()
    branch.extend_context([1, 2])
    branch.extend_completion(
        Completion(
            token_ids=np.array([3, 4, 5], np.int32),
            logprobs=np.array([-0.5, -1.0, -2.0], np.float32),
            policy_versions=np.array([7, 7, 8], np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    rollout.branches = [branch]
    rollout.metrics["generate_s"] = 0.25
    rollout.metadata["seen"] = [place_of(rollout)]
    return rollout


@pytest.mark.parametrize("how", ["in place", "copies", "split", "unscored"])
def test_metadata_metrics_and_versions_come_out_as_they_went_in(how: str) -> None:
    async def play(rollout: Rollout) -> Reward:
        filled(rollout)
        return Reward(0.1, components={"style": 0.3}, columns={"state": "kept"})

    async def score(group: Group) -> Group | list[Group]:
        group.metadata["question"] = "why"
        group.metrics["judge_calls"] = 2
        if how == "unscored":
            raise ConnectionError
        for rollout in group.rollouts:
            assert rollout.reward is not None
            rollout.reward = replace(rollout.reward, value=1.0)
        if how == "copies":
            return replace(group, rollouts=[replace(rollout) for rollout in group.rollouts])
        return await halves(group) if how == "split" else group

    async def main() -> list[Group]:
        keep = ErrorBudget(on_error="keep_unscored")
        return await gather_groups(play, rows(2), group_size=4, score_group=score, score_errors=keep)

    groups = run_in_virtual_time(main())
    assert sum(group.metrics.get("judge_calls", 0) for group in groups) == 4  # told once, also where it was split
    for group in groups:
        assert group.metadata == {"question": "why"}
        for rollout in group.rollouts:
            assert (rollout.metrics["generate_s"], rollout.metadata["seen"]) == (0.25, [place_of(rollout)])
            assert rollout.branches[0].policy_versions.tolist() == [-1, -1, 7, 7, 8]
            assert rollout.branches[0].logprobs[2:].tolist() == [-0.5, -1.0, -2.0]
            if how == "unscored":
                assert rollout.reward is None
                assert (rollout.metrics["style"], rollout.metadata["state"]) == (0.3, "kept")
            else:
                assert rollout.reward == Reward(1.0, {"style": 0.3}, {"state": "kept"})


# --- error budgets ---------------------------------------------------------------------------------------------------


def test_the_first_failure_ends_everything_by_default_and_leaves_nothing_running() -> None:
    async def main() -> None:
        played = Played(3)
        with pytest.raises(ErrorBudgetSpent, match=r"1 of 16 rollouts failed.*rollout 3") as raised:
            await gather_groups(played, rows(4), group_size=4)
        assert isinstance(raised.value, ExceptionGroup)
        assert [str(error) for error in raised.value.exceptions] == ["rollout 3"]
        assert (played.running, played.cancelled) == (0, 15)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(main())


def test_a_count_of_failed_rollouts_is_tolerated_and_their_groups_are_smaller() -> None:
    counts = tailrace.GroupCounts()
    budget = ErrorBudget(max_count=2)
    groups = run_in_virtual_time(
        gather_groups(Played(1, 2), rows(2), group_size=4, rollout_errors=budget, counts=counts)
    )
    assert [len(group.rollouts) for group in groups] == [2, 4]
    assert [place_of(rollout) for rollout in groups[0].rollouts] == [0, 3]
    assert (counts.rollouts_failed, counts.rollouts_finished) == (2, 6)
    with pytest.raises(ErrorBudgetSpent, match=r"3 of 8 rollouts failed.*max_count = 2") as raised:
        run_in_virtual_time(gather_groups(Played(1, 2, 5), rows(2), group_size=4, rollout_errors=budget))
    assert len(raised.value.exceptions) == 3


def test_a_rollout_that_reports_what_is_no_dict_is_one_that_failed() -> None:
    async def play(rollout: Rollout) -> Reward:
        return Reward(1.0, columns="note" if place_of(rollout) == 1 else {})  # type: ignore[arg-type]

    counts = tailrace.GroupCounts()
    budget = ErrorBudget(max_count=1)
    (group,) = run_in_virtual_time(gather_groups(play, rows(1), group_size=3, rollout_errors=budget, counts=counts))
    assert [place_of(rollout) for rollout in group.rollouts] == [0, 2]
    assert counts.rollouts_failed == 1


def test_a_share_is_judged_after_the_first_twenty_and_when_all_is_over() -> None:
    async def gather(*failing: int, tasks: int) -> list[Group]:
        budget = ErrorBudget(max_share=0.1)
        return await gather_groups(
            Played(*failing), rows(tasks), group_size=1, rollout_errors=budget, rollout_concurrency=1
        )

    assert len(run_in_virtual_time(gather(0, 1, 2, tasks=40))) == 37  # 3 of 3 early on, and 3 of 40 in the end
    with pytest.raises(ErrorBudgetSpent, match="3 of 23 rollouts"):
        run_in_virtual_time(gather(0, 1, 22, tasks=40))
    with pytest.raises(ErrorBudgetSpent, match="2 of 10 rollouts"):
        run_in_virtual_time(gather(0, 1, tasks=10))


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.none() | st.integers(0, 50),
    st.none() | st.floats(0, 1),
)
def test_a_budget_that_allows_some_failures_allows_fewer(
    started: int, failed: int, max_count: int | None, max_share: float | None
) -> None:
    budget = ErrorBudget(max_count=max_count, max_share=max_share)
    failed = min(failed, started)
    if budget.allows(failed=failed, started=started, is_over=True):
        assert all(budget.allows(failed=fewer, started=started, is_over=True) for fewer in range(failed))
        assert budget.allows(failed=failed, started=started)
    assert budget.allows(failed=0, started=started, is_over=True)


class TestFailedScores:
    async def score(self, group: Group) -> Group:
        await asyncio.sleep(1)
        if group.index % 3 == 1:
            group.rollouts[0].reward = Reward(99.0)
            group.rollouts.pop()
            raise ConnectionError("the judge is down")
        return group

    def gather(self, budget: ErrorBudget, counts: tailrace.GroupCounts) -> list[Group]:
        return run_in_virtual_time(
            gather_groups(one, rows(6), group_size=2, score_group=self.score, score_errors=budget, counts=counts)
        )

    def test_raise_ends_everything(self) -> None:
        with pytest.raises(ErrorBudgetSpent, match=r"groups' scores failed, which score_errors .*the judge is down"):
            self.gather(ErrorBudget(on_error="raise"), tailrace.GroupCounts())

    def test_drop_leaves_the_group_out(self) -> None:
        counts = tailrace.GroupCounts()
        groups = self.gather(ErrorBudget(max_count=2), counts)
        assert [group.index for group in groups] == [0, 2, 3, 5]
        assert (counts.groups_failed, counts.groups_scored) == (2, 4)

    def test_keep_unscored_keeps_the_whole_group_without_any_reward(self) -> None:
        counts = tailrace.GroupCounts()
        groups = self.gather(ErrorBudget(on_error="keep_unscored"), counts)
        assert [[r.reward is None for r in group.rollouts] for group in groups] == [
            [group.index % 3 == 1] * 2 for group in groups
        ]
        assert (counts.groups_unscored, counts.groups_scored, counts.mean_reward) == (2, 4, 1.0)
        with pytest.raises(ValueError, match="without a reward"):
            _ = groups[1].rewards

    def test_beyond_the_budget_is_one_group_of_errors(self) -> None:
        with pytest.raises(ErrorBudgetSpent) as raised:
            self.gather(ErrorBudget(on_error="keep_unscored", max_count=1), tailrace.GroupCounts())
        assert [type(error) for error in raised.value.exceptions] == [ConnectionError] * 2

    def test_rollouts_and_scores_have_budgets_of_their_own(self) -> None:
        groups = run_in_virtual_time(
            gather_groups(
                Played(0),
                rows(6),
                group_size=2,
                score_group=self.score,
                rollout_errors=ErrorBudget(max_count=1),
                score_errors=ErrorBudget(max_count=2),
            )
        )
        assert len(groups) == 4


@pytest.mark.parametrize(("on_error", "sizes"), [("drop", [2, 3]), ("keep_unscored", [3, 3])])
def test_a_reward_that_fails_is_never_a_reward(on_error: str, sizes: list[int]) -> None:
    async def reward(rollout: Rollout) -> float:
        if rollout.rollout_id == "0.1":
            raise ConnectionError
        return 0.5

    budget = ErrorBudget.model_validate({"on_error": on_error})
    groups = run_in_virtual_time(gather_groups(one, rows(2), group_size=3, reward=reward, score_errors=budget))
    assert [len(group.rollouts) for group in groups] == sizes
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    assert rewards.count(Reward(0.5)) == 5
    assert rewards.count(None) == sum(sizes) - 5


def test_a_result_without_a_reward_waits_for_its_group() -> None:
    async def play(rollout: Rollout) -> tailrace.AgentResult:
        return tailrace.AgentResult(metrics={"style": 0.5}, info={"state": "kept"})

    async def rank(group: Group) -> list[tailrace.AgentResult]:
        return [tailrace.AgentResult(float(place_of(rollout))) for rollout in group.rollouts]

    (group,) = run_in_virtual_time(gather_groups(play, rows(1), group_size=2, score_group=rank))
    assert group.rewards == [0.0, 1.0]
    assert (group.rollouts[0].metrics["style"], group.rollouts[0].metadata) == (0.5, {"state": "kept"})
    with pytest.raises(ErrorBudgetSpent, match="is missing"):
        run_in_virtual_time(gather_groups(play, rows(1)))


def test_a_rollout_that_nobody_scores_is_told() -> None:
    async def play(rollout: Rollout) -> None:
        return None

    with pytest.raises(ErrorBudgetSpent, match="is missing") as raised:
        run_in_virtual_time(gather_groups(play, rows(1)))
    assert isinstance(raised.value.exceptions[0], InvalidReward)


@pytest.mark.parametrize("nested", [False, True])
def test_an_engine_that_is_gone_is_within_no_budget(nested: bool) -> None:
    async def play(rollout: Rollout) -> float:
        await asyncio.sleep(place_of(rollout))
        raise ExceptionGroup("of parallel turns", [EngineFailed("gone")]) if nested else EngineFailed("gone")

    with pytest.raises(ExceptionGroup) as raised:
        run_in_virtual_time(gather_groups(play, rows(2), rollout_errors=ErrorBudget()))
    assert not isinstance(raised.value, ErrorBudgetSpent)
    assert {type(error) for error in raised.value.exceptions} == {EngineFailed}


# --- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5])
def test_a_cancellation_waits_for_every_child_and_is_not_swallowed(after_s: float) -> None:
    scoring = 0

    async def score(group: Group) -> Group:
        nonlocal scoring
        scoring += 1
        try:
            await asyncio.sleep(1)
        finally:
            scoring -= 1
        return group

    async def main() -> None:
        played = Played()
        gathering = asyncio.create_task(gather_groups(played, rows(4), group_size=2, score_group=score))
        await asyncio.sleep(after_s)
        gathering.cancel()
        await asyncio.sleep(0.1)
        gathering.cancel()  # the impatient cancel twice
        with pytest.raises(asyncio.CancelledError):
            await gathering
        assert (played.running, scoring) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(main())


@pytest.mark.parametrize("where", ["play", "score"])
def test_a_child_that_is_cancelled_by_itself_cancels_all(where: str) -> None:
    async def play(rollout: Rollout) -> float:
        await asyncio.sleep(1)
        if where == "play" and rollout.rollout_id == "1.0":
            raise asyncio.CancelledError
        return 1.0

    async def score(group: Group) -> Group:
        if where == "score" and group.index == 1:
            raise asyncio.CancelledError
        await asyncio.sleep(1)
        return group

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await gather_groups(play, rows(3), group_size=2, score_group=score, score_errors=ErrorBudget())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(main())


def test_a_stream_that_is_left_early_ends_what_still_runs() -> None:
    async def main() -> None:
        played = Played()
        async with aclosing(stream_groups(played, rows(8), group_size=2)) as groups:
            async for _ in groups:
                break
        assert played.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(main())


def test_a_consumer_that_fails_ends_what_still_runs_and_keeps_its_own_error() -> None:
    async def main() -> None:
        played = Played()

        async def divide() -> None:
            async with aclosing(stream_groups(played, rows(8), group_size=2)) as groups:
                async for group in groups:
                    _ = 1 / (group.index - group.index)

        with pytest.raises(ZeroDivisionError):
            await divide()
        assert played.running == 0

    run_in_virtual_time(main())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_goes_wrong_no_task_lives_and_every_rollout_is_counted(data: st.DataObject) -> None:
    troubles = data.draw(st.dictionaries(st.integers(0, 11), st.sampled_from(["raise", "cancel", "slow"])))
    judged = data.draw(st.lists(st.sampled_from(["ok", "raise", "drop", "cancel"]), min_size=4, max_size=4))
    budget = data.draw(st.sampled_from([ErrorBudget(), ErrorBudget(on_error="raise"), ErrorBudget(max_count=1)]))
    cancel_s = data.draw(st.none() | st.floats(0, 3))

    async def play(rollout: Rollout) -> float:
        trouble = troubles.get(rollout.task["n"] * 3 + place_of(rollout))
        await asyncio.sleep(2 if trouble == "slow" else 1)
        if trouble == "raise":
            raise ConnectionError
        if trouble == "cancel":
            raise asyncio.CancelledError
        return 1.0

    async def score(group: Group) -> Group | None:
        await asyncio.sleep(0.5)
        match judged[group.index]:
            case "raise":
                raise ConnectionError
            case "cancel":
                raise asyncio.CancelledError
            case "drop":
                return None
        return group

    async def main() -> None:
        counts = tailrace.GroupCounts()
        gathering = asyncio.create_task(
            gather_groups(
                *(play, rows(4)),
                group_size=3,
                score_group=score,
                rollout_errors=budget,
                score_errors=budget,
                counts=counts,
            )
        )
        if cancel_s is not None:
            asyncio.get_running_loop().call_later(cancel_s, gathering.cancel)
        await asyncio.wait({gathering})
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if not gathering.cancelled() and gathering.exception() is None:
            assert (counts.rollouts_over, counts.groups_over) == (12, 4)
            assert len(gathering.result()) == counts.groups_scored
        else:
            assert gathering.cancelled() or isinstance(gathering.exception(), ExceptionGroup)

    run_in_virtual_time(main())


# --- progress --------------------------------------------------------------------------------------------------------


def test_two_progress_bars_tell_counts_and_running_means() -> None:
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True, width=120)
    run_in_virtual_time(gather_groups(staggered, rows(3), group_size=2, progress=console))
    last = printed.getvalue().rsplit("rollouts", 1)[1]
    assert "6/6" in last
    assert "mean 14.5 s" in last
    assert "3/3" in last
    assert "mean reward 0.500" in last


@pytest.mark.parametrize("end", ["finished", "failed", "cancelled", "left"])
def test_the_bars_are_closed_however_it_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[GroupBars] = []
    closed: list[GroupBars] = []
    enter, leave = GroupBars.__enter__, GroupBars.__exit__
    monkeypatch.setattr(GroupBars, "__enter__", lambda bars: opened.append(bars) or enter(bars))
    monkeypatch.setattr(GroupBars, "__exit__", lambda bars, *error: closed.append(bars) or leave(bars, *error))
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True)

    async def main() -> None:
        played = Played(*([1] if end == "failed" else []))
        async with aclosing(stream_groups(played, rows(4), group_size=2, progress=console)) as groups:
            async for _ in groups:
                if end == "left":
                    break
                if end == "cancelled":
                    raise asyncio.CancelledError

    if end in {"finished", "left"}:
        run_in_virtual_time(main())
    else:
        with pytest.raises((ErrorBudgetSpent, asyncio.CancelledError)):
            run_in_virtual_time(main())
    assert opened == closed != []
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed.getvalue().count(hide) == printed.getvalue().count(show) == 1


def test_importing_the_library_imports_neither_torch_nor_pydantic_before_it_is_used() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tailrace; assert not {'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules);"
        "tailrace.gather_groups; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
