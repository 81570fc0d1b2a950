"""A rollout that an agent worker plays is the rollout that the orchestrator's own loop would have played."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import BudgetExceeded, EngineFailed, EnvironmentFailed, RequestRefused
from tailrace.records import Branch, Rollout
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.agent_workers import WorkerWatch
from tailrace.tracing.phases import PhaseRecorder
from tailrace.tracing.traces import TraceWriter, join_trace
from tests.rollouts.agent_workers.played import Run
from tests.support.agent_environments import MEETING
from tests.support.chrome_trace import crossings, read_trace, spans

TIMES = ("environment_s", "generate_s", "score_s")


def assert_equal_branches(first: Branch, second: Branch) -> None:
    for name in ("token_ids", "logprobs", "policy_versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)
    for name in ("completion_spans", "mixed_spans", "payload_chunks", "temperature", "version_counts", "num_weighted"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.columns.keys() == second.columns.keys()
    for name, column in first.columns.items():
        assert column.dtype == second.columns[name].dtype
        np.testing.assert_array_equal(column, second.columns[name])


def assert_equal_rollouts(first: Rollout, second: Rollout) -> None:
    assert first.messages == second.messages
    assert first.sampled_texts == second.sampled_texts
    assert first.first_reply == second.first_reply is not None
    assert (first.turns, first.truncated, first.attempt) == (second.turns, second.truncated, second.attempt)
    assert first.reward is not None
    assert second.reward is not None
    assert first.reward.value == second.reward.value
    assert first.reward.components.keys() == second.reward.components.keys()
    assert {key: first.reward.columns[key] for key in ("said",)} == {
        key: second.reward.columns[key] for key in ("said",)
    }
    plain = [{key: value for key, value in one.metrics.items() if key not in TIMES} for one in (first, second)]
    assert plain[0] == plain[1]
    assert first.metrics.keys() == second.metrics.keys()
    assert len(first.branches) == len(second.branches)
    for one, other in zip(first.branches, second.branches, strict=True):
        assert_equal_branches(one, other)


@pytest.mark.parametrize("behave", ["well", "rewrite", "columns", "stop", "much"])
@pytest.mark.parametrize("records_experts", [False, True], ids=["plain", "experts"])
async def test_a_rollout_is_the_same_in_a_worker_and_on_the_loop(
    renderer: ChatRenderer, behave: str, records_experts: bool
) -> None:
    rollouts = []
    for workers in (0, 1):
        async with Run(renderer, workers=workers, chunk_tokens=1, records_experts=records_experts) as run:
            rollouts.append(await run.rollout(behave, ["<think>hm</think>yes and stop there", "no", "maybe"]))
    assert_equal_rollouts(*rollouts)
    assert rollouts[0].sampled_texts[1].startswith("<think>hm</think>yes")


async def test_synchronous_agents_run_beside_each_other_however_few_cores_there_are(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        rollouts = await asyncio.gather(*(run.rollout("meet") for _ in range(MEETING.parties)))
    assert [rollout.turns for rollout in rollouts] == [2] * MEETING.parties


async def test_agents_environments_and_rewards_run_in_the_worker_without_torch(renderer: ChatRenderer) -> None:
    async with Run(renderer, "agents", "counting", "graded", "checked") as run:
        rollouts = await asyncio.gather(
            *(run.rollout(name=name) for name in ("agents", "counting", "graded", "checked"))
        )
        (worker,) = run.agents.pids().values()
    rewards = [rollout.reward for rollout in rollouts]
    agents, counting, graded, checked = (reward for reward in rewards if reward is not None)
    assert agents.components["pid"] == counting.components["pid"] == graded.components["pid"] == worker
    assert agents.columns["torch_is_imported"] is False
    assert (counting.value, counting.columns) == (1.5, {"steps": 3})
    assert graded.value == 0.75
    assert checked.value not in (worker, os.getpid())  # synchronous code has a process of its own there, too


@pytest.mark.parametrize("users", [None, "/of/the/user"])
async def test_what_an_agent_starts_finds_the_users_python_path(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    """An interpreter of its own must not find the modules of Tailrace's."""
    if users is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", users)
    async with Run(renderer, "checked") as run:
        rollout = await run.rollout("start a process", name="checked")
    assert rollout.reward is not None
    assert (rollout.reward.columns["path"], rollout.reward.columns["path_of_reward"]) == (users, users)


async def test_rollouts_go_to_the_worker_that_holds_the_fewest(renderer: ChatRenderer) -> None:
    async with Run(renderer, workers=2) as run:
        await run.rollouter.start()
        rollouts = await asyncio.gather(*(run.rollout() for _ in range(8)))
        pids = [rollout.reward.components["pid"] for rollout in rollouts if rollout.reward is not None]
        assert sorted(pids.count(float(pid)) for pid in run.agents.pids().values()) == [4, 4]


@pytest.mark.parametrize("error", [RequestRefused("too long"), EngineFailed("no engine is left")])
async def test_what_generation_raises_reaches_the_agent_and_the_caller(
    renderer: ChatRenderer, error: Exception
) -> None:
    async with Run(renderer) as run:
        with pytest.raises(type(error), match=str(error)):
            await run.rollout(replies=[error])


async def test_what_users_code_raises_names_the_task_and_keeps_the_tokens(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        with pytest.raises(EnvironmentFailed, match=r"(?s)agents/train/0.*ZeroDivisionError: of the user.*agent_env"):
            await run.rollout("raise")
        with pytest.raises(
            EnvironmentFailed, match="agents/train/0: what the rollout reported: a object cannot leave a worker"
        ):
            await run.rollout("unserializable")
        assert [lost.num_completion_tokens > 0 for lost in run.lost.values()] == [True, True]
        rollout = await run.rollout("numpy")
    assert rollout.reward is not None
    assert (rollout.reward.columns["array"], rollout.reward.columns["number"]) == ([0, 1, 2], 0.5)


async def test_a_budget_that_is_spent_ends_the_rollout_as_it_does_on_the_loop(renderer: ChatRenderer) -> None:
    messages = []
    for workers in (0, 1):
        async with Run(renderer, workers=workers, max_turns=1) as run:
            with pytest.raises(BudgetExceeded) as raised:
                await run.rollout()
            messages.append(str(raised.value))
    assert messages[0] == messages[1]


async def test_cancelling_ends_the_agent_and_its_request_and_keeps_finished_turns(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        run.held.add("agents-1")
        waiting, asking = run.begin("wait"), run.begin()
        await asyncio.gather(*(run.asked[name].wait() for name in ("agents-0", "agents-1")))
        for task in (waiting, asking):
            task.cancel()
        await asyncio.wait({waiting, asking})
        assert (waiting.cancelled(), asking.cancelled(), run.aborted) == (True, True, ["agents-1"])
        assert run.agents.flush_figures()[0].rollouts == 0
        assert {name: lost.turns for name, lost in run.lost.items()} == {"agents-0": 1, "agents-1": 1}
        assert (await run.rollout()).turns == 2


async def test_phases_and_lag_of_a_worker_are_told_while_it_runs(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        await run.rollout()
        taken: Counter[str] = Counter()
        while taken["rollout"] < 1:
            await asyncio.sleep(0.05)
            taken.update({name: usage.count for name, usage in run.agents.flush_phases().items()})
        assert (taken["render"], taken["generate"], taken["environment"]) == (2, 2, 1)


async def test_a_rollout_is_one_in_the_trace_and_scored_once(renderer: ChatRenderer, tmp_path: Path) -> None:
    parts = tmp_path / "trace"
    trace = TraceWriter(parts, "orchestrator", max_bytes=1_000_000)
    with PhaseRecorder(trace).recording():
        async with Run(renderer, "agents", "graded", watch=WorkerWatch(None, parts, 1_000_000)) as run:
            await asyncio.gather(run.rollout(), run.rollout(name="graded"))
    trace.close()
    join_trace(parts, tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    for name in ("rollout", "wait_for_worker"):
        assert sorted(span["args"]["rollout"] for span in spans(events, name)) == ["agents-0", "graded-1"]
    assert len(spans(events, "score")) == 1  # the other one's agent brought its reward
    assert crossings(events) == []
