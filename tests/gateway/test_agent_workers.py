"""Agent workers have gateways of their own, one each, for the rollouts that they hold."""

from __future__ import annotations

import asyncio

from tailrace.gateway import Gateway
from tailrace.rollouts import ChatRenderer
from tests.rollouts.agent_workers.played import Run


async def test_each_worker_answers_for_its_own_rollouts(renderer: ChatRenderer) -> None:
    async with Run(renderer, "requests", workers=2, endpoints=Gateway()) as run:
        await run.rollouter.start()
        rollouts = await asyncio.gather(*(run.rollout(name="requests") for _ in range(4)))
        pids = set(run.agents.pids().values())
    addresses = set()
    for rollout in rollouts:
        assert rollout.reward is not None
        assert rollout.reward.columns["said"] == ["yes", "no"]
        addresses.add((rollout.reward.components["pid"], rollout.reward.columns["url"]))
        (branch,) = rollout.branches
        assert len(branch.completion_spans) == 2
    assert {pid for pid, _ in addresses} == pids
    assert len(addresses) == 2
