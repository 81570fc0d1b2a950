"""Agent workers have gateways of their own, one each, for the rollouts that they hold."""

from __future__ import annotations

import asyncio

from tailrace.config.gateway import GatewaySettings
from tailrace.free_ports import free_port
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


async def test_with_a_port_each_worker_listens_at_one_of_those_after_it(renderer: ChatRenderer) -> None:
    port = free_port(count=3)
    async with Run(renderer, "requests", workers=2, endpoints=Gateway(GatewaySettings(port=port))) as run:
        await run.rollouter.start()
        for taken in (1, 2):
            _, writer = await asyncio.open_connection("127.0.0.1", port + taken)
            writer.close()
        rollouts = await asyncio.gather(*(run.rollout(name="requests") for _ in range(4)))
    addresses = {rollout.reward.columns["url"] for rollout in rollouts if rollout.reward is not None}
    assert addresses == {f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"}
