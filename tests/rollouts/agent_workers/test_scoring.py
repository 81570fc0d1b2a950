"""A group that an agent worker scores is the group that the orchestrator would have, and what fails there costs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tailrace.environments import JudgeSettings
from tailrace.errors import InvalidReward, JudgeFailed, RolloutError, ScoringFailed, WorkerLost
from tailrace.records import Group, GroupId, Rollout
from tailrace.rollouts import ChatRenderer
from tests.rollouts.agent_workers.played import Run, score_in_a_killed_worker, until
from tests.support.judge_endpoint import Answer, endpoint
from tests.support.scripted_generate import ScriptedGenerate


async def scored(
    run: Run, behave: str, name: str = "ranked", replies: Sequence[str] = ("yes", "no")
) -> tuple[list[Rollout], list[Group]]:
    """The members of a group of three, and what became of it."""
    members = [await run.rollout(behave, replies, name) for _ in range(3)]
    group = Group(GroupId("g"), members[0].task, list(members), metadata={"own": 1})
    return members, await run.rollouter.score(group)


def shown(groups: list[Group]) -> list[object]:
    """All that scoring sets, but for times and process ids."""
    return [
        (
            group.index,
            group.metadata,
            sorted(group.metrics),
            None if group.advantages is None else [np.asarray(one).tolist() for one in group.advantages],
            [
                (
                    rollout.rollout_id,
                    None if rollout.reward is None else (rollout.reward.value, rollout.reward.columns.get("tokens")),
                    rollout.metadata,
                    [{key: column.tolist() for key, column in one.columns.items()} for one in rollout.branches],
                )
                for rollout in group.rollouts
            ],
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    "behave",
    [
        *("well", "results", "results with advantages", "numbers", "plain numbers", "results and numbers"),
        *("fractions", "fractions that are set", "split", "drop"),
    ],
)
async def test_a_group_is_scored_in_a_worker_as_on_the_loop(renderer: ChatRenderer, behave: str) -> None:
    found = []
    for workers in (0, 1):
        async with Run(renderer, "ranked", workers=workers) as run:
            members, groups = await scored(run, behave)
            found.append(shown(groups))
            kept = [rollout for group in groups for rollout in group.rollouts]
            assert all(any(rollout is member for member in members) for rollout in kept)
            if behave == "well":
                pids = {rollout.reward.components["pid"] for rollout in kept if rollout.reward is not None}
                assert pids == ({float(os.getpid())} if workers == 0 else set(run.agents.pids().values()))
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("behave", "message"),
    [
        ("words", "the reward of rollout ranked-0 is 'good' .*; it must be a number"),
        ("results and words", "the reward of rollout ranked-1 is 'good' .*; it must be a number"),
        ("complex", r"the reward of rollout ranked-0 is 1j \(complex\); it must be a number"),
        ("complex results", r"the reward of rollout ranked-0 is 1j \(complex\); it must be a number"),
        ("metrics of a word", "AgentResult.metrics is 'good' .*; it must be a dict"),
    ],
)
async def test_what_is_no_reward_is_a_mistake_of_the_score_wherever_that_runs(
    renderer: ChatRenderer, workers: int, behave: str, message: str
) -> None:
    async with Run(renderer, "ranked", workers=workers) as run:
        with pytest.raises(InvalidReward, match=f"task ranked/train/0.*{message}") as raised:
            await scored(run, behave)
    assert raised.value.is_mistake


async def test_named_rewards_for_whole_groups_run_in_the_worker(renderer: ChatRenderer) -> None:
    async with Run(renderer, "weighed") as run:
        members, _ = await scored(run, "well", "weighed")
        (pid,) = run.agents.pids().values()
        rewards = [rollout.reward.value for rollout in members if rollout.reward is not None]
    assert rewards == [pid] * 3


@pytest.mark.parametrize("workers", [0, 1])
async def test_an_answer_that_the_prompt_shows_is_no_completion_of_a_rollout_or_group(
    renderer: ChatRenderer, workers: int
) -> None:
    async with Run(renderer, "shown_before", workers=workers) as run:
        members, _ = await scored(run, "well", "shown_before")
    components = [rollout.reward.components for rollout in members if rollout.reward is not None]
    assert components == [{"alone": 301.0, "together": 301.0}] * 3


@pytest.mark.parametrize("workers", [0, 1])
async def test_reasoning_is_in_the_completion_of_a_rollout_and_of_a_group(renderer: ChatRenderer, workers: int) -> None:
    async with Run(renderer, "thoughtful", workers=workers) as run:
        members, _ = await scored(run, "well", "thoughtful", ["<think>hm</think>yes"])
    components = [rollout.reward.components for rollout in members if rollout.reward is not None]
    assert components == [{"alone": 1.0, "together": 1.0}] * 3


@pytest.mark.parametrize("workers", [0, 1])
async def test_tokens_that_are_scored_are_of_the_latest_turns_branch(renderer: ChatRenderer, workers: int) -> None:
    async with Run(renderer, "several", workers=workers) as run:
        members, _ = await scored(run, "well", "several")
    for rollout in members:
        talk, helped = rollout.branches
        (first, end), _ = talk.completion_spans
        assert renderer.tokenizer.decode(talk.token_ids[first:end].tolist()) == "yes<|im_end|>"
        assert helped.num_completion_tokens
        total = float(talk.token_ids[first:].sum())
        assert rollout.reward is not None
        assert rollout.reward.components == {"alone": total, "together": total}


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        ("raise in the score", "ZeroDivisionError: of the score"),
        ("exit in the score", r"users' code raised SystemExit\(6\)"),
        ("foreign", "returned rollout elsewhere which is not of this group"),
    ],
)
async def test_a_score_that_fails_costs_its_group(renderer: ChatRenderer, behave: str, message: str) -> None:
    async with Run(renderer, "ranked") as run:
        with pytest.raises(ScoringFailed, match=f"(?s)ranked/train/0.*{message}"):
            await scored(run, behave)
        assert len((await scored(run, "well"))[1]) == 1
        assert run.agents.flush_figures()[0].restarts == 0


async def test_a_score_that_crashes_is_tried_in_one_more_worker_and_then_fails(renderer: ChatRenderer) -> None:
    async with Run(renderer, "ranked") as run:
        with pytest.raises(RolloutError, match="died of SIGSEGV in rank ") as raised:
            await scored(run, "crash in the score")
        assert isinstance(raised.value, WorkerLost)
        await asyncio.wait_for(scored(run, "well"), 60)
        assert run.agents.flush_figures()[0].restarts == 2


async def test_a_score_waits_for_the_worker_that_has_had_its_environment(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    (module := tmp_path / "own.py").touch()
    async with Run(renderer, "ranked_while", workers="auto", args={"path": str(module)}) as run:
        member = await run.rollout(name="ranked_while")
        scoring = await score_in_a_killed_worker(run, member, module)
        await until(lambda: "RuntimeError: half saved" in caplog.text)
        module.touch()
        (group,) = await scoring
        assert group.rollouts[0].reward is not None
        assert [group.rollouts[0].reward.components["pid"]] == [*run.agents.pids().values()]


@pytest.mark.parametrize(
    "replies", [["the verdict"], ["nonsense", "the verdict"]], ids=["at once", "at the second call"]
)
async def test_a_judge_scores_in_a_worker_as_on_the_loop(renderer: ChatRenderer, replies: list[str]) -> None:
    found = []
    for workers in (0, 1):
        async with Run(renderer, "judged", workers=workers) as run:
            run.judge = ScriptedGenerate(renderer.tokenizer, replies)
            _, (group,) = await scored(run, "well", "judged")
            process = group.metadata.pop("judged in")
            assert process in ([os.getpid()] if workers == 0 else run.agents.pids().values())
            usage = run.rollouter.judge_usage
            assert (usage.calls, usage.retries) == (len(replies), len(replies) - 1)
            assert group.metrics["judge_calls"] == len(replies)
            rewards = [rollout.reward for rollout in group.rollouts]
            found.append([(one.value, one.components["judge"], one.components["own"]) for one in rewards if one])
    assert found[0] == found[1] == [(number / 10 + 0.5, number / 10, 1.0) for number in range(3)]


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_judge_of_which_settings_say_one_thing_is_else_the_environments_own(
    renderer: ChatRenderer, workers: int
) -> None:
    async with Run(renderer, "judged", workers=workers, judge=JudgeSettings(weight=2.0)) as run:
        _, (group,) = await scored(run, "well", "judged")
    rewards = [rollout.reward.value for rollout in group.rollouts if rollout.reward is not None]
    assert rewards == [2 * (number / 10) + 0.5 for number in range(3)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("behave", "is_judged", "own"), [("results", False, ["place"]), ("numbers", False, []), ("well", True, ["judge"])]
)
async def test_what_agents_report_without_a_reward_is_part_of_the_one_that_their_groups_score_gives(
    renderer: ChatRenderer, workers: int, behave: str, is_judged: bool, own: list[str]
) -> None:
    async with Run(renderer, "unrewarded", workers=workers, args={"is_judged": is_judged}) as run:
        members, _ = await scored(run, behave, "unrewarded")
    for rollout in members:
        assert rollout.reward is not None
        assert [*rollout.reward.components] == ["pid", "turns", *own]
        assert rollout.reward.columns["said"] == ["yes", "no"]


async def test_a_judge_at_an_endpoint_is_asked_by_the_worker(renderer: ChatRenderer) -> None:
    async with (
        endpoint(Answer(content="the verdict")) as serving,
        Run(renderer, "judged", args={"url": serving.url}) as run,
    ):
        for _ in range(2):
            _, (group,) = await scored(run, "well", "judged")
            assert group.metadata["judged in"] in run.agents.pids().values()
        assert len(serving.asked) == run.rollouter.judge_usage.calls == 2
        assert serving.connections == 1


async def test_a_judge_without_valid_scores_fails_its_group(renderer: ChatRenderer) -> None:
    async with Run(renderer, "judged") as run:
        run.judge = ScriptedGenerate(renderer.tokenizer, ["nonsense", "nonsense"])
        with pytest.raises(JudgeFailed, match=r"judged/train/0: .* in 2 calls; the last: it said 'nonsense'"):
            await scored(run, "well", "judged")
        assert run.rollouter.judge_usage.failed_groups == 1


async def test_a_judges_format_that_crashes_costs_its_group(renderer: ChatRenderer) -> None:
    async with Run(renderer, "judged") as run:
        with pytest.raises(WorkerLost, match=r"died of SIGSEGV in scores \(.*\) while it ran the score of group g"):
            await scored(run, "crash in the judge", "judged")
        assert (await run.rollout(name="judged")).turns == 2
