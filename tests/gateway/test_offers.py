"""Rollouts that clients outside claim, over real HTTP: who gets which, what ends them, and what waiting costs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import EnvironmentSpec, NamedReward, Offer, brought_tasks, outside_agent
from tailrace.environments.rows import ClientRow
from tailrace.errors import ClientLost, EnvironmentFailed, InvalidReward, RolloutTimeout, SettingsError
from tailrace.gateway import Gateway
from tailrace.gateway.claims import Claim
from tailrace.gateway.offers import Offers
from tailrace.records import GroupId, Message, Rollout, RolloutId, Task, TaskId
from tailrace.rollouts import ChatRenderer, Rollouter, RolloutSettings
from tests.support.clocks import move_clock
from tests.support.loaded import loaded
from tests.support.networks import needs_ipv6
from tests.support.scripted_generate import ScriptedGenerate

TASKS = [{"word": f"word {number}"} for number in range(4)]


def outside(name: str = "shop", *, lease_s: float = 60.0, **more: Any) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, agent=outside_agent(lease_s=lease_s), train_tasks=TASKS, trusted=True, **more)


def test_a_task_is_brought_with_what_named_rewards_take() -> None:
    def right(completions: object, answer: object) -> list[float]:
        return [1.0]

    rewards = {"right": NamedReward(right)}
    row = EnvironmentSpec(name="desk", agent=outside_agent(), train_tasks=brought_tasks("word"), rewards=rewards)
    asked = row.train_task(0).row
    assert isinstance(asked, ClientRow)
    assert [asked.missing(brought) for brought in ({"word": 1}, {"answer": 1}, {"word": 1, "answer": 1})] == [
        *("answer", "word", None)
    ]


def desk(*, lease_s: float = 60.0) -> EnvironmentSpec:
    """Clients bring its tasks."""
    tasks = brought_tasks("word")
    return EnvironmentSpec(name="desk", agent=outside_agent(lease_s=lease_s), train_tasks=tasks, trusted=True)


@dataclass
class Outside:
    """A rollouter behind a gateway, its rollouts, and a client with the run's key."""

    gateway: Gateway
    rollouter: Rollouter
    client: httpx.AsyncClient
    specs: dict[str, EnvironmentSpec]
    generate: ScriptedGenerate
    running: list[asyncio.Task[Rollout]] = field(default_factory=list)

    async def begin(self, index: int = 0, environment: str = "shop", task: Task | None = None) -> asyncio.Task[Rollout]:
        """One more rollout; it is offered when this returns."""
        offered = sum(self.gateway.offers.waiting.values())
        work = self.rollouter.run(
            task or self.specs[environment].train_task(index),
            rollout_id=RolloutId(f"r{len(self.running)}"),
            group_id=GroupId("g"),
        )
        self.running.append(asyncio.create_task(work))
        async with asyncio.timeout(30):
            while sum(self.gateway.offers.waiting.values()) == offered:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.running[-1]

    async def post(self, url: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        root = self.gateway.root_url if url.startswith("/") else ""
        sent = self.gateway.offers.key if key is None else key
        headers = {"authorization": f"Bearer {sent}"} if sent else {}
        return await self.client.post(root + url, json=body, headers=headers, timeout=None)  # the clock may be moved

    async def claim(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/rollouts", body)
        assert response.status_code == 200, response.text
        claimed: dict[str, Any] = response.json()
        return claimed

    async def ask(self, claimed: dict[str, Any]) -> httpx.Response:
        body = {"model": "policy", "messages": [{"role": "user", "content": claimed["task"]["word"]}]}
        return await self.post(f"{claimed['openai_base_url']}/chat/completions", body, claimed["key"])

    async def report(self, claimed: dict[str, Any], reward: float) -> httpx.Response:
        return await self.post(f"{claimed['rollout_url']}/reward", {"reward": reward}, claimed["key"])


@contextlib.asynccontextmanager
async def offering(
    renderer: ChatRenderer, *specs: EnvironmentSpec, delay_s: float = 0.0, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Outside]:
    chosen = RolloutSettings.model_validate(settings)
    generate = ScriptedGenerate(renderer.tokenizer, ["Ada"], delay=lambda: delay_s)
    async with Gateway(GatewaySettings(host=host)) as gateway, httpx.AsyncClient() as client:
        await gateway.listen()
        environments = loaded(*specs, settings=chosen)
        async with Rollouter(
            chosen, environments, renderer=renderer, generate=generate, endpoints=gateway
        ) as rollouter:
            made = Outside(gateway, rollouter, client, {spec.name: spec for spec in specs}, generate)
            try:
                yield made
            finally:
                for task in made.running:
                    task.cancel()
                await asyncio.gather(*made.running, return_exceptions=True)


async def test_a_client_claims_plays_and_rewards_a_rollout(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside(), max_turns=3) as run:
        running = await run.begin(2)
        claimed = await run.claim()
        assert (claimed["task"], claimed["task_id"]) == (TASKS[2], "shop/train/2")
        assert claimed["limits"] == {"max_turns": 3, "max_tokens": 256, "timeout_s": 600.0}
        answer = await run.ask(claimed)
        assert answer.json()["choices"][0]["message"]["content"] == "Ada"
        assert (await run.report(claimed, 0.5)).status_code == 200
        rollout = await running
        assert rollout.reward is not None
        assert (rollout.reward.value, rollout.turns) == (0.5, 1)
        assert rollout.messages[-1]["content"] == "Ada"
        late = await run.ask(claimed)
        assert (late.status_code, "has ended" in late.text) == (410, True)
        assert run.gateway.offers.held == 0


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=needs_ipv6)])
async def test_a_client_on_another_machine_is_told_addresses_of_this_one(renderer: ChatRenderer, host: str) -> None:
    """`localhost` stands for a name that only the client knows."""
    async with offering(renderer, outside(), host=host) as run:
        running = await run.begin()
        address = urlsplit(run.gateway.root_url)
        assert run.gateway.public_url == f"http://{socket.gethostname()}:{address.port}"
        claimed = (await run.post(f"http://localhost:{address.port}/rollouts", {})).json()
        addresses = [claimed[name] for name in ("openai_base_url", "anthropic_base_url", "rollout_url")]
        assert {urlsplit(one).netloc for one in addresses} == {f"localhost:{address.port}"}
        assert (await run.ask(claimed)).status_code == 200
        await run.report(claimed, 1.0)
        assert (await running).reward is not None


async def test_clients_bring_tasks_and_the_rollouts_of_a_group_are_about_one(renderer: ChatRenderer) -> None:
    hush, psst = {"word": "hush", "more": [1]}, {"word": "psst"}
    async with offering(renderer, desk(), outside()) as run:
        first, other = (run.specs["desk"].train_task(index) for index in range(2))
        for task in (first, first, first, other):
            await run.begin(environment="desk", task=task)
        assert (await run.post("/rollouts", {"environment": "desk"})).status_code == 204
        claimed = [await run.claim(task=task) for task in (hush, psst, hush)]
        waiting = asyncio.create_task(run.claim(task=psst, wait_s=60))
        claimed.append(await run.claim())
        work = run.rollouter.run(other, rollout_id=RolloutId("r4"), group_id=GroupId("g"))
        run.running.append(asyncio.create_task(work))
        claimed.append(await waiting)
        assert [one["task"] for one in claimed] == [hush, psst, hush, hush, psst]
        for one in claimed:
            await run.ask(one)
            await run.report(one, 1.0)
        rollouts = await asyncio.gather(*run.running)
    assert [dict(rollout.task.row) for rollout in rollouts] == [hush, hush, hush, psst, psst]
    assert [rollout.messages[0]["content"] for rollout in rollouts] == ["hush", "hush", "hush", "psst", "psst"]


class WatchedRow(ClientRow):
    """Counts how often it is looked at."""

    looks = 0
    _is_filled = False

    @property
    def is_filled(self) -> bool:
        WatchedRow.looks += 1
        return self._is_filled

    @is_filled.setter
    def is_filled(self, is_filled: bool) -> None:
        self._is_filled = is_filled


async def test_a_claim_that_brings_a_task_looks_at_each_rollout_once() -> None:
    offers = Offers()

    async def offer(number: int) -> None:
        task = Task(TaskId(f"desk/{number}"), "desk", number, WatchedRow())
        async with offers.claimed(Offer(task, lease_s=1.0, limit_s=1.0)) as tell:
            tell(str(number).encode())

    async with asyncio.TaskGroup() as offered:
        tasks = [offered.create_task(offer(number)) for number in range(50)]
        while sum(offers.waiting.values()) < len(tasks):  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0)
        WatchedRow.looks = 0
        assert await offers.claim(Claim(task={"word": "hush"})) == b"0"
        assert WatchedRow.looks < 60
        for task in tasks:
            task.cancel()


async def test_a_task_that_was_brought_stays_with_the_attempt_after_a_lost_client(renderer: ChatRenderer) -> None:
    async with offering(renderer, desk(lease_s=0.2)) as run:
        task = run.specs["desk"].train_task(0)
        lost = await run.begin(environment="desk", task=task)
        await run.claim(task={"word": "hush"})
        with pytest.raises(ClientLost):
            await lost
        await run.begin(environment="desk", task=task)
        assert (await run.claim())["task"] == {"word": "hush"}


async def test_the_rollout_that_has_waited_longest_is_claimed_first(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside(), outside("inn")) as run:
        for index, name in enumerate(("shop", "inn", "shop")):
            await run.begin(index, name)
        assert run.gateway.offers.waiting == {"shop": 2, "inn": 1}
        assert (await run.claim())["task_id"] == "shop/train/0"
        assert (await run.claim(environment="shop"))["task_id"] == "shop/train/2"
        assert (await run.post("/rollouts", {"environment": "shop"})).status_code == 204
        assert (await run.claim())["task_id"] == "inn/train/1"


async def test_waiting_is_no_failure_and_costs_nothing_of_a_rollouts_time(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offering(renderer, outside(), timeout_s=50.0) as run:
        running = await run.begin()
        await move_clock(monkeypatch, 100.0)
        assert not running.done()
        claimed = await run.claim()
        await run.ask(claimed)
        await run.report(claimed, 1.0)
        assert (await running).reward is not None
        late = await run.begin()
        await run.claim()
        await move_clock(monkeypatch, 100.0)
        with pytest.raises(RolloutTimeout, match=r"its client has not ended it 50 s after claiming it"):
            await late


async def test_a_client_that_waits_gets_the_next_rollout(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        claiming = asyncio.create_task(run.claim(wait_s=60))
        work = run.rollouter.run(run.specs["shop"].train_task(1), rollout_id=RolloutId("r"), group_id=GroupId("g"))
        run.running.append(asyncio.create_task(work))
        assert (await claiming)["task_id"] == "shop/train/1"


async def test_a_client_that_waits_is_told_that_the_run_has_ended(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        waiting = asyncio.create_task(run.post("/rollouts", {"wait_s": 60}))
        async with asyncio.timeout(30):
            while not run.gateway.offers.asking:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.005)
            await run.gateway.close()
            told = await waiting
    assert (told.status_code, "the run has ended" in told.text) == (410, True)


async def test_a_client_that_hung_up_takes_no_rollout_along(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        gone = asyncio.create_task(run.claim(wait_s=60))
        for asking in (1, 0):
            async with asyncio.timeout(30):
                while run.gateway.offers.asking != asking:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await run.begin()
        assert (await run.claim())["task_id"] == "shop/train/0"


async def test_a_client_that_hung_up_before_it_was_told_leaves_its_rollout_to_the_next(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        running = await run.begin()
        gone = asyncio.create_task(run.gateway.offers.claim(Claim(wait_s=30)))
        await asyncio.sleep(0)  # it has found the rollout
        gone.cancel()
        claimed = await run.claim(wait_s=5)
        await run.ask(claimed)
        await run.report(claimed, 1.0)
        assert (await running).reward is not None
        assert not run.gateway.offers.held


async def test_a_silent_client_loses_its_rollout_and_one_that_waits_for_an_answer_does_not(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offering(renderer, outside(lease_s=60.0), delay_s=100.0) as run:
        silent, patient = await run.begin(0), await run.begin(1)
        lost, kept = await run.claim(), await run.claim()
        answering = asyncio.create_task(run.ask(kept))
        async with asyncio.timeout(30):
            while not run.generate.calls:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        await move_clock(monkeypatch, 61.0)
        with pytest.raises(ClientLost, match=r"not heard of for 60 s") as raised:
            await silent
        assert raised.value.reason == "client_lost"
        assert (await run.ask(lost)).status_code == 410
        await move_clock(monkeypatch, 45.0)
        assert (await answering).status_code == 200
        await move_clock(monkeypatch, 30.0)  # of work of its own, well within the lease
        await run.report(kept, 1.0)
        assert (await patient).reward is not None


async def test_a_rollout_that_is_cancelled_is_offered_no_more_and_its_client_is_told(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        waiting, held = await run.begin(0), await run.begin(1)
        first = await run.claim()
        assert first["task_id"] == "shop/train/0"
        for running in (waiting, held):
            running.cancel()
        await asyncio.gather(waiting, held, return_exceptions=True)
        assert run.gateway.offers.waiting == {}
        assert (await run.ask(first)).status_code == 410
        assert (await run.post("/rollouts", {})).status_code == 204


async def score(task: Task, messages: list[Message]) -> float:
    return float(len(messages))


async def test_an_end_without_a_reward_is_scored_or_fails(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside(), outside("scored", reward=score)) as run:
        for name, expected in (("scored", 2.0), ("shop", None)):
            running = await run.begin(0, name)
            claimed = await run.claim()
            await run.ask(claimed)
            await run.post(f"{claimed['rollout_url']}/end", {}, claimed["key"])
            if expected is None:
                with pytest.raises(InvalidReward):
                    await running
            else:
                rollout = await running
                assert rollout.reward is not None
                assert rollout.reward.value == expected
        running = await run.begin()
        claimed = await run.claim()
        await run.report(claimed, 1.0)
        with pytest.raises(EnvironmentFailed, match="without a reply of the model"):
            await running


@pytest.mark.parametrize(
    ("body", "key", "status", "says"),
    [
        ({}, "", 401, "the run's own key"),
        ({}, "something", 401, "the run's own key"),
        ({}, "a rollout's", 401, "the run's own key"),
        ({"wait_s": 61}, None, 400, "from 0 to 60"),
        ({"wait_s": -1}, None, 400, "from 0 to 60"),
        ({"environmnt": "shop"}, None, 400, "environmnt"),
        ({"environment": 3}, None, 400, "environment"),
        ({"task": 3}, None, 400, "task"),
        ({"task": {"word": 2**64}}, None, 400, "task has an integer beyond 64 bits"),
        ({"task": {"word": "mine"}}, None, 400, "have tasks of their own: leave `task` out"),
        ({"environment": "desk", "task": {"world": "mine"}}, None, 400, "a task of 'desk' needs a column 'word'"),
    ],
)
async def test_what_cannot_be_claimed_is_refused_by_name(
    renderer: ChatRenderer, body: dict[str, Any], key: str | None, status: int, says: str
) -> None:
    async with offering(renderer, outside(), desk()) as run:
        await run.begin()
        await run.begin()
        if body.get("environment") == "desk":
            await run.begin(environment="desk")
        if key == "a rollout's":
            key = (await run.claim())["key"]
        refused = await run.post("/rollouts", body, key)
        assert (refused.status_code, says in refused.text) == (status, True), refused.text
        assert sum(run.gateway.offers.waiting.values()) >= 1


async def test_an_environment_that_nobody_plays_outside_is_refused_where_they_are_known(renderer: ChatRenderer) -> None:
    async with offering(renderer, outside()) as run:
        run.gateway.offers.environments = ["shop", "inn"]
        refused = await run.post("/rollouts", {"environment": "pub"})
        assert (refused.status_code, "there are: shop, inn" in refused.text) == (404, True)
        assert (await run.post("/rollouts", {"environment": "inn"})).status_code == 204


@pytest.mark.parametrize("make", [lambda: outside_agent(lease_s=0), lambda: outside_agent(lease_s=float("nan"))])
def test_a_lease_that_nobody_could_keep_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(SettingsError, match="no client could ever keep a rollout"):
        make()
