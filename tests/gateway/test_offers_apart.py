"""Rollouts that clients outside claim from the orchestrator, and play with the agent worker that has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import Offer, brought_tasks
from tailrace.environments.rows import ClientRow
from tailrace.errors import ClientLost, RolloutTimeout, WorkerLost
from tailrace.free_ports import free_port
from tailrace.gateway import Gateway
from tailrace.gateway.claims import Claim
from tailrace.gateway.offers import Offers
from tailrace.records import Rollout, Task, TaskId
from tailrace.rollouts import ChatRenderer
from tests.rollouts.agent_workers.played import Run
from tests.support.clocks import move_clock


@dataclass
class Elsewhere:
    """Rollouts in agent workers, the orchestrator's gateway, and a client."""

    run: Run
    gateway: Gateway
    client: httpx.AsyncClient

    async def post(self, url: str, body: dict[str, Any], key: str) -> httpx.Response:
        return await self.client.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)

    async def claim(self, **body: Any) -> dict[str, Any]:
        answer = await self.post(f"{self.gateway.root_url}/rollouts", {"wait_s": 30, **body}, self.gateway.offers.key)
        assert answer.status_code == 200, answer.text
        claimed: dict[str, Any] = answer.json()
        return claimed

    async def ask(self, claimed: dict[str, Any], root_url: str | None = None) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "go"}]}
        url = f"{root_url}/v1" if root_url else claimed["openai_base_url"]
        return await self.post(f"{url}/chat/completions", body, claimed["key"])

    async def report(self, claimed: dict[str, Any], reward: float) -> httpx.Response:
        return await self.post(f"{claimed['rollout_url']}/reward", {"reward": reward}, claimed["key"])

    async def play(self, claimed: dict[str, Any], reward: float) -> None:
        for answer in (await self.ask(claimed), await self.report(claimed, reward)):
            assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def elsewhere(
    renderer: ChatRenderer, name: str = "elsewhere", *, port: int = 0, **options: Any
) -> AsyncIterator[Elsewhere]:
    gateway = Gateway(GatewaySettings(port=port))
    async with Run(renderer, name, endpoints=gateway, **options) as run, httpx.AsyncClient() as client:
        await run.rollouter.start()
        await gateway.listen()
        yield Elsewhere(run, gateway, client)


async def test_a_client_claims_from_the_orchestrator_and_asks_the_worker_that_has_the_rollout(
    renderer: ChatRenderer,
) -> None:
    async with elsewhere(renderer, workers=2) as here:
        running = [here.run.begin(name="elsewhere", replies=["yes"]) for _ in range(4)]
        claimed = [await here.claim() for _ in running]
        assert here.gateway.offers.held == 4
        addresses = {one["anthropic_base_url"] for one in claimed}
        assert len(addresses) == 2
        assert here.gateway.root_url not in addresses
        assert len(here.gateway.sessions) == 0  # of no rollout does the orchestrator see a request
        for number, one in enumerate(claimed):
            await here.play(one, number / 4)
        rollouts = await asyncio.gather(*running)
        assert sorted(rollout.reward.value for rollout in rollouts if rollout.reward) == [0, 0.25, 0.5, 0.75]
        for rollout in rollouts:
            (branch,) = rollout.branches
            ((start, _),) = branch.completion_spans
            asked = here.run.scripted[rollout.rollout_id].calls[0].prompt_token_ids
            assert branch.token_ids[:start].tolist() == asked.tolist()
        assert here.gateway.offers.held == 0
        for url in (None, here.gateway.root_url):
            late = await here.ask(claimed[0], url)
            assert (late.status_code, "has ended" in late.text) == (410, True)


async def test_waiting_for_a_client_takes_nothing_of_a_rollouts_time_and_holds_no_worker(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(renderer, timeout_s=50.0) as here:
        running = here.run.begin(name="elsewhere", replies=["yes"])
        async with asyncio.timeout(30):
            while not here.gateway.offers.waiting:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.005)
        await move_clock(monkeypatch, 100.0)
        assert here.run.agents.flush_figures()[0].rollouts == 0
        await here.play(await here.claim(), 1.0)
        assert (await running).reward is not None
    async with elsewhere(renderer, timeout_s=1.0) as here:
        late = here.run.begin(name="elsewhere", replies=["yes"])
        await here.claim()
        with pytest.raises(RolloutTimeout, match=r"its client has not ended it 1 s after claiming it"):
            await late


async def test_a_silent_client_loses_its_rollout(renderer: ChatRenderer) -> None:
    async with elsewhere(renderer, "impatient") as here:
        running = here.run.begin(name="impatient")
        claimed = await here.claim()
        with pytest.raises(ClientLost, match=r"not heard of for 1 s") as raised:
            await running
        assert raised.value.reason == "client_lost"
        assert (await here.ask(claimed)).status_code == 410


async def test_a_client_that_hung_up_before_it_was_told_leaves_its_rollout_to_the_next(renderer: ChatRenderer) -> None:
    async with elsewhere(renderer) as here:
        running = here.run.begin(name="elsewhere", replies=["yes"])
        (pid,) = here.run.agents.pids().values()
        os.kill(pid, signal.SIGSTOP)
        gone = asyncio.create_task(here.claim())
        async with asyncio.timeout(30):
            while not here.gateway.offers.held:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.005)
            gone.cancel()
            while not here.gateway.tally.requests["claim", 0]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        os.kill(pid, signal.SIGCONT)
        await here.play(await here.claim(), 1.0)
        rollout = await running
        assert rollout.reward is not None
        assert (rollout.turns, len(rollout.branches), rollout.attempt) == (1, 1, 1)
        assert not here.gateway.offers.held


async def test_a_rollout_that_is_cancelled_is_taken_from_its_client(renderer: ChatRenderer) -> None:
    async with elsewhere(renderer) as here:
        waiting, held = (here.run.begin(name="elsewhere") for _ in range(2))
        claimed = await here.claim()
        for running in (waiting, held):
            running.cancel()
        await asyncio.gather(waiting, held, return_exceptions=True)
        assert (here.gateway.offers.waiting, here.gateway.offers.held) == ({}, 0)
        assert (await here.ask(claimed)).status_code == 410


async def test_a_worker_that_dies_costs_its_rollouts_and_their_clients_are_told(renderer: ChatRenderer) -> None:
    """The one in its place has the same port, and knows the keys of the run."""
    async with elsewhere(renderer, port=free_port(count=2)) as here:
        running, unclaimed = (here.run.begin(name="elsewhere", replies=["yes"]) for _ in range(2))
        claimed = await here.claim()
        assert (await here.ask(claimed)).status_code == 200
        (pid,) = here.run.agents.pids().values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="elsewhere/train/0: agent worker 0 died of SIGKILL"):
            await running
        assert here.run.lost["elsewhere-0"].num_completion_tokens > 0
        assert here.gateway.offers.held == 0
        other = await here.claim()  # nobody had claimed it, so that no worker had it
        for refused in (await here.ask(claimed), await here.report(claimed, 1.0)):
            assert (refused.status_code, "has ended" in refused.text) == (410, True)
        await here.play(other, 0.5)
        rollout = await unclaimed
        assert rollout.reward is not None
        assert rollout.reward.value == 0.5


async def test_a_task_that_a_client_brings_is_that_of_the_whole_group(renderer: ChatRenderer) -> None:
    async with elsewhere(renderer, "brought") as here:
        row = brought_tasks("behave")[0]
        assert isinstance(row, ClientRow)
        running = [here.run.begin(name="brought", replies=["yes"], row=row) for _ in range(2)]
        claimed = [await here.claim(task={"behave": "mine"}), await here.claim()]
        assert [one["task"] for one in claimed] == [{"behave": "mine"}] * 2
        for one in claimed:
            await here.play(one, 1.0)
        rollouts: list[Rollout] = await asyncio.gather(*running)
        assert [dict(rollout.task.row) for rollout in rollouts] == [{"behave": "mine"}] * 2


async def test_a_client_whose_rollout_could_not_be_opened_gets_the_next_one() -> None:
    """Its worker died before it had said where it is."""
    offers = Offers()
    tasks = [Task(TaskId(f"t{number}"), "shop", number, {}) for number in range(2)]

    async def lose() -> None:
        async with offers.claimed(Offer(tasks[0], 60, 60)):
            raise WorkerLost("it died")

    async def open_it() -> None:
        async with offers.claimed(Offer(tasks[1], 60, 60)) as tell:
            tell(b"here it is")

    playing = [asyncio.create_task(lose()), asyncio.create_task(open_it())]
    assert await offers.claim(Claim(wait_s=30)) == b"here it is"
    lost, _ = await asyncio.gather(*playing, return_exceptions=True)
    assert isinstance(lost, WorkerLost)
    assert (offers.held, offers.waiting) == (0, {})
