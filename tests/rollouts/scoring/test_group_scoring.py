"""Scoring as runs do it, through the rollouter: budgets and a concurrency of its own, limits that are fair."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import numpy as np
import pytest

from tailrace.batching import sample_group
from tailrace.environments import AgentResult, EnvironmentSpec, Message, Policy
from tailrace.errors import (
    EnvironmentFailed,
    ErrorBudgetSpent,
    InvalidReward,
    RolloutTimeout,
    ScoringFailed,
    SettingsError,
)
from tailrace.records import Group, GroupId, Reward, Rollout, RolloutId, SamplingParams, Task
from tailrace.rollouts import ChatRenderer, Rollouter, RolloutSettings
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring import EndpointScorer, Teacher, TeacherPlan
from tailrace.scheduling import EvaluationResult, SchedulingSettings, evaluate
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import make_rollout
from tests.support.loaded import loaded
from tests.support.scripted_generate import ScriptedGenerate

ROWS = [{"names": "Bob, Ada"}]


async def ask(task: Task, policy: Policy) -> float:
    await policy.chat([{"role": "user", "content": task["names"]}])
    return 1.0


async def broken(task: Task, policy: Policy) -> float:
    raise ConnectionError("the sandbox is gone")


async def outage(task: Task, messages: list[Message]) -> float:
    raise ConnectionError("the checker is gone")


def spec_of(agent: Callable[..., Awaitable[object]] = ask, name: str = "own", **more: object) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, agent=agent, train_tasks=ROWS, **more)  # type: ignore[arg-type]


def rollouter(
    renderer: ChatRenderer,
    *specs: EnvironmentSpec,
    teacher: Teacher | None = None,
    takes_demonstrations: bool = True,
    **settings: object,
) -> Rollouter:
    chosen = RolloutSettings.model_validate(settings)
    return Rollouter(
        chosen,
        loaded(*specs, settings=chosen),
        renderer=renderer,
        generate=ScriptedGenerate(renderer.tokenizer, ["Ada, Bob"]),
        teacher=teacher,
        facts=RunFacts(takes_demonstrations=takes_demonstrations),
    )


async def run(rollouts: Rollouter, spec: EnvironmentSpec) -> Rollout:
    return await rollouts.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))


def played_group(spec: EnvironmentSpec, rewards: list[float]) -> Group:
    """Rollouts of two context and two sampled tokens."""
    task, group_id = spec.train_task(0), GroupId("g0")
    rollouts = [
        make_rollout(task, group_id, RolloutId(f"r{number}"), reward=reward, tokens=2)
        for number, reward in enumerate(rewards)
    ]
    return Group(group_id, task, rollouts)


def group_of(spec: EnvironmentSpec, number: int = 0) -> Group:
    task, group_id = spec.train_task(0), GroupId(f"g{number}")
    rollout = Rollout(RolloutId(f"r{number}"), group_id, task, SamplingParams(), reward=Reward(0.5, {"own": 0.5}))
    return Group(group_id, task, [rollout])


async def test_failed_rollouts_and_failed_rewards_have_budgets_of_their_own(renderer: ChatRenderer) -> None:
    budgets = {"rollout_errors": {"max_count": 1}, "score_errors": {"max_count": 2}}
    unchecked, sandboxed = spec_of(reward=outage, name="unchecked"), spec_of(broken, name="sandboxed")
    async with rollouter(renderer, unchecked, sandboxed, **budgets) as rollouts:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="the checker is gone"):
                await run(rollouts, unchecked)
        with pytest.raises(EnvironmentFailed, match="the sandbox is gone"):
            await run(rollouts, sandboxed)
        with pytest.raises(
            ErrorBudgetSpent, match=r"3 of 3 rewards failed.*rollouts.score_errors.*max_count = 2"
        ) as scores:
            await run(rollouts, unchecked)
        with pytest.raises(ErrorBudgetSpent, match=r"2 of 5 rollouts failed.*rollouts.rollout_errors.*max_count = 1"):
            await run(rollouts, sandboxed)
    assert [type(error) for error in scores.value.exceptions] == [EnvironmentFailed] * 3


async def test_a_rollout_whose_reward_failed_can_be_kept_without_one(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> Reward:
        await ask(task, policy)
        return Reward(1.0, columns={"state": "kept"})

    spec = spec_of(agent, reward=outage)
    async with rollouter(renderer, spec, score_errors={"on_error": "keep_unscored"}) as rollouts:
        rollout = await run(rollouts, spec)
    assert rollout.reward is None
    assert rollout.num_completion_tokens > 0
    assert rollout.metadata == {"state": "kept"}


async def test_what_was_reported_is_part_of_a_groups_score_where_the_own_reward_failed_and_is_kept_without(
    renderer: ChatRenderer,
) -> None:
    async def agent(task: Task, policy: Policy) -> AgentResult:
        await ask(task, policy)
        return AgentResult(metrics={"turns": 3.0, "loss": float("nan")}, info={"state": "kept"})

    async def rank(group: Group) -> list[float]:
        return [2.0]

    spec = spec_of(agent, reward=outage, score_group=rank)
    async with rollouter(renderer, spec, score_errors={"on_error": "keep_unscored"}) as rollouts:
        rollout = await run(rollouts, spec)
        group = group_of(spec)
        group.rollouts = [rollout]
        assert await rollouts.score(group) == [group]
    assert rollout.reward == Reward(2.0, {"turns": 3.0}, {"state": "kept"})


@pytest.mark.parametrize(("at_once", "seen"), [(2, 2), (0, 12)])
def test_only_so_many_groups_are_scored_at_once_and_waiting_is_not_within_the_limit(
    renderer: ChatRenderer, at_once: int, seen: int
) -> None:
    live, most = 0, 0

    async def rank(group: Group) -> Group:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(1)
        live -= 1
        return group

    async def main() -> list[list[Group]]:
        spec = spec_of(score_group=rank)
        async with rollouter(renderer, spec, score_concurrency=at_once, reward_timeout_s=1.5) as rollouts:
            return await asyncio.gather(*(rollouts.score(group_of(spec, number)) for number in range(12)))

    scored = run_in_virtual_time(main())
    assert most == seen
    assert [group.metrics["score_group_s"] for (group,) in scored] == [1.0] * 12


def test_a_group_that_takes_too_long_is_a_failed_score_and_gives_its_place_back(renderer: ChatRenderer) -> None:
    async def hang(group: Group) -> Group:
        if group.group_id == "g0":
            await asyncio.Event().wait()
        return group

    async def main() -> None:
        spec = spec_of(score_group=hang)
        async with rollouter(renderer, spec, score_concurrency=1, reward_timeout_s=5) as rollouts:
            with pytest.raises(RolloutTimeout):
                await rollouts.score(group_of(spec))
            assert len(await rollouts.score(group_of(spec, 1))) == 1

    run_in_virtual_time(main())


async def test_a_failed_score_leaves_the_rewards_as_they_were(renderer: ChatRenderer) -> None:
    async def half_done(group: Group) -> Group:
        group.rollouts[0].reward = Reward(99.0)
        group.rollouts = []
        raise ConnectionError

    spec = spec_of(score_group=half_done)
    group = group_of(spec)
    async with rollouter(renderer, spec) as rollouts:
        with pytest.raises(ScoringFailed):
            await rollouts.score(group)
    assert group.rewards == [0.5]


async def test_what_an_environment_scores_comes_after_the_teacher(renderer: ChatRenderer) -> None:
    async def level(group: Group) -> Group:
        group.advantages = [0.0] * len(group.rollouts)
        return group

    async def rank(group: Group) -> list[AgentResult]:
        return [AgentResult(2.0)]

    specs = [spec_of(score_group=one, name=one.__name__) for one in (level, rank)]
    groups = {spec.name: group_of(spec) for spec in specs}  # which have no tokens to ask about
    teacher = Teacher(EndpointScorer("http://nowhere.invalid/v1", "big", vocabulary=1024, top_k=0), TeacherPlan())
    async with rollouter(renderer, *specs, teacher=teacher) as rollouts:
        for group in groups.values():
            assert await rollouts.score(group) == [group]
            assert group.metrics["teacher_calls"] == 0
    assert groups["level"].advantages == [0.0]
    assert groups["rank"].rewards == [2.0]


async def test_advantages_that_a_scorer_sets_stay_with_the_rollouts_that_it_sorted(renderer: ChatRenderer) -> None:
    async def best_first(group: Group) -> Group:
        group.rollouts = sorted(group.rollouts, key=lambda rollout: -group.rewards[group.rollouts.index(rollout)])
        group.advantages = list(np.linspace(1, -1, len(group.rollouts)))
        return group

    spec = spec_of(score_group=best_first)
    group = played_group(spec, rewards=[1.0, 3.0, 2.0])
    async with rollouter(renderer, spec) as rollouts:
        (scored,) = await rollouts.score(group)
    assert [rollout.rollout_id for rollout in scored.rollouts] == ["r0", "r1", "r2"]
    assert scored.advantages == [-1.0, 1.0, 0.0]
    samples = sample_group(scored, oldest_version=0).samples
    assert [(sample.rollout_id, sample.advantages) for sample in samples] == [("r0", -1.0), ("r1", 1.0), ("r2", 0.0)]


@pytest.mark.parametrize(
    ("advantages", "error"),
    [
        ([1.0], "group g0 has 1 advantages for 2 rollouts"),
        ([1.0, float("nan")], "rollout r1 has an advantage that is not finite"),
        ([1.0, [0.5, 0.5]], r"rollout r1 has 4 tokens; its advantages per token have the shape \(2,\)"),
        ([1.0, "good"], "could not convert string to float"),
        (1.0, "'float' object is not iterable"),
    ],
)
async def test_advantages_of_which_no_batch_can_be_made_fail_the_groups_score(
    renderer: ChatRenderer, advantages: object, error: str
) -> None:
    async def score(group: Group) -> Group:
        group.advantages = advantages  # type: ignore[assignment]
        return group

    spec = spec_of(score_group=score)
    async with rollouter(renderer, spec) as rollouts:
        with pytest.raises(ScoringFailed, match=f"the advantages that score_group set: {error}"):
            await rollouts.score(played_group(spec, rewards=[1.0, 0.0]))


async def test_a_scorer_may_set_advantages_of_tokens(renderer: ChatRenderer) -> None:
    async def later_is_better(group: Group) -> Group:
        group.advantages = [[0, 0, 0.5, 1], 0]  # type: ignore[list-item]
        return group

    spec = spec_of(score_group=later_is_better)
    async with rollouter(renderer, spec) as rollouts:
        (scored,) = await rollouts.score(played_group(spec, rewards=[1.0, 0.0]))
    first, second = sample_group(scored, oldest_version=0).samples
    assert np.array_equal(first.advantages, np.array([0, 0, 0.5, 1], np.float32))
    assert second.advantages == 0.0


@pytest.mark.parametrize(
    ("name", "takes_demonstrations", "evaluation_seed", "error"),
    [
        ("teacher_logprobs", True, None, ScoringFailed),
        ("proximal_logprobs", True, 0, ScoringFailed),
        ("cross_entropy_weights", False, None, SettingsError),
        ("cross_entropy_weights", False, 0, None),
        ("cross_entropy_weights", True, None, None),
        ("weights", False, None, None),
    ],
)
async def test_scoring_is_refused_the_columns_that_an_agent_is_refused(
    renderer: ChatRenderer,
    name: str,
    takes_demonstrations: bool,
    evaluation_seed: int | None,
    error: type[Exception] | None,
) -> None:
    async def mark(group: Group) -> Group:
        group.rollouts[0].branches[0].set_column(name, [1.0], start=2)
        return group

    spec = spec_of(score_group=mark)
    group = played_group(spec, rewards=[1.0])
    async with rollouter(renderer, spec, takes_demonstrations=takes_demonstrations) as rollouts:
        with nullcontext() if error is None else pytest.raises(error, match=f"column '{name}'"):
            assert await rollouts.runner(evaluation_seed=evaluation_seed).score(group) == [group]


async def test_results_for_a_group_replace_the_rewards_and_keep_what_came_with_them(renderer: ChatRenderer) -> None:
    async def rank(group: Group) -> list[AgentResult]:
        return [AgentResult(2, {"rank": 1.0}, {"why": "brief"})]

    async def abstain(group: Group) -> list[AgentResult]:
        return [AgentResult(None)]

    async def too_many(group: Group) -> list[AgentResult]:
        return [AgentResult(1.0)] * 2

    async def endless(group: Group) -> list[AgentResult]:
        return [AgentResult(float("inf"))]

    specs = [spec_of(score_group=one, name=one.__name__) for one in (rank, abstain, too_many, endless)]
    groups = {spec.name: group_of(spec) for spec in specs}
    async with rollouter(renderer, *specs) as rollouts:
        for name in ("rank", "abstain"):
            assert await rollouts.score(groups[name]) == [groups[name]]
        with pytest.raises(ScoringFailed, match="score_group returned 2 results for 1 rollouts"):
            await rollouts.score(groups["too_many"])
        with pytest.raises(InvalidReward, match="the reward of rollout r0 is inf; it must be finite"):
            await rollouts.score(groups["endless"])
    rewards = {name: group.rollouts[0].reward for name, group in groups.items()}
    assert rewards["rank"] == Reward(2.0, {"own": 0.5, "rank": 1.0}, {"why": "brief"})
    assert [rewards[name] for name in ("abstain", "too_many", "endless")] == [Reward(0.5, {"own": 0.5})] * 3


async def test_what_comes_with_a_result_without_a_reward_is_added_to_the_rollouts_own(renderer: ChatRenderer) -> None:
    async def comment(group: Group) -> list[AgentResult]:
        return [AgentResult(None, {"style": 2.0}, {"why": "brief"})]

    spec = spec_of(score_group=comment)
    rewarded, unscored = group_of(spec), group_of(spec, 1)
    unscored.rollouts[0].reward = None
    async with rollouter(renderer, spec, score_errors={"on_error": "keep_unscored"}) as rollouts:
        for group in (rewarded, unscored):
            assert await rollouts.score(group) == [group]
    assert rewarded.rollouts[0].reward == Reward(0.5, {"own": 0.5, "style": 2.0}, {"why": "brief"})
    assert unscored.rollouts[0].reward is None
    assert (unscored.rollouts[0].metrics, unscored.rollouts[0].metadata) == ({"style": 2.0}, {"why": "brief"})


@pytest.mark.parametrize(
    ("short", "reward"),
    [(3, 3.0), (3.0, 3.0), (True, 1.0), (np.float32(3.0), 3.0), (np.bool_(True), 1.0), (Reward(3.0), 3.0), (None, 0.5)],
)
async def test_a_result_for_a_group_has_short_forms(renderer: ChatRenderer, short: object, reward: float) -> None:
    async def rank(group: Group) -> list[object]:
        return [short]

    spec = spec_of(score_group=rank)
    group = group_of(spec)
    async with rollouter(renderer, spec) as rollouts:
        assert await rollouts.score(group) == [group]
    assert group.rollouts[0].reward == Reward(reward, {"own": 0.5})


async def measured(rollouts: Rollouter, spec: EnvironmentSpec) -> dict[str, EvaluationResult]:
    runner = rollouts.runner(evaluation_seed=0)
    return await evaluate([spec.train_task(0)] * 2, runner, SchedulingSettings(), concurrency=1)


async def silent(task: Task, policy: Policy) -> None:
    await ask(task, policy)


async def centre(group: Group) -> Group:
    mean = sum(group.rewards) / len(group.rewards)
    for rollout in group.rollouts:
        rollout.reward = Reward(group.rewards[0] - mean)
    return group


async def test_an_evaluation_measures_what_rollouts_earn_and_not_how_they_compare(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(score_group=centre)
    async with rollouter(renderer, spec) as rollouts:
        assert (await measured(rollouts, spec))["own"].rewards == [1.0, 1.0]
    assert "played once" not in caplog.text


@pytest.mark.parametrize(
    ("needs_whole_group", "found", "told"),
    [
        (False, ([3.0, 3.0], {}), "each task is played once: what scores groups sees a single rollout"),
        (True, ([], {"unscored": 2}), "each task is played once: it needs whole groups, so that they stay without a"),
    ],
)
async def test_an_evaluation_of_rollouts_without_a_reward_says_that_each_is_scored_alone(
    renderer: ChatRenderer,
    caplog: pytest.LogCaptureFixture,
    needs_whole_group: bool,
    found: tuple[list[float], dict[str, int]],
    told: str,
) -> None:
    async def rank(group: Group) -> list[AgentResult]:
        return [AgentResult(3.0) for _ in group.rollouts]

    spec = spec_of(silent, score_group=rank, needs_whole_group=needs_whole_group)
    async with rollouter(renderer, spec) as rollouts:
        result = (await measured(rollouts, spec))["own"]
    assert (result.rewards, result.failed) == found
    assert [told in record.message for record in caplog.records if "played once" in record.message] == [True]


@pytest.mark.parametrize(
    "failing",
    [{"agent": broken}, {"reward": outage}, {"agent": silent, "score_group": centre}],
    ids=["playing", "own reward", "group"],
)
async def test_what_fails_in_an_evaluation_is_told_and_ends_nothing(
    renderer: ChatRenderer, failing: dict[str, object]
) -> None:
    spec = spec_of(**failing)  # type: ignore[arg-type]
    raising = {"rollout_errors": {"on_error": "raise"}, "score_errors": {"on_error": "raise"}}
    async with rollouter(renderer, spec, **raising) as rollouts:
        result = (await measured(rollouts, spec))["own"]
        assert (result.rewards, sum(result.failed.values())) == ([], 2)
        if "score_group" not in failing:
            with pytest.raises(ErrorBudgetSpent, match=r"1 of 1 (rollouts|rewards) failed"):
                await run(rollouts, spec)
