"""Cancelling a rollout reaches its agent, tools, requests and rewards, and returns once they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import pytest

from tailrace.environments import EnvironmentSpec, Message, Observation, Policy, Task, ToolSpec, answer_tool_calls
from tailrace.errors import EnvironmentFailed, RolloutTimeout
from tailrace.records import Completion, GenerationRequest, Group, GroupId, OnChunk, Rollout, RolloutId, SamplingParams
from tailrace.rollouts import ChatRenderer, Rollouter, RolloutSettings
from tailrace.rollouts.deadline import Attempts
from tests.support.loaded import loaded
from tests.support.scripted_generate import ScriptedGenerate

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})


class Cancelled:
    """One rollout, cancelled once it has `reached` what a test is about."""

    def __init__(self, renderer: ChatRenderer, replies: Sequence[str] = ("hello",), delay_s: float = 0.0) -> None:
        self.generate = ScriptedGenerate(renderer.tokenizer, replies, delay=lambda: delay_s)
        self.renderer = renderer
        self.reached = asyncio.Event()
        self.ended: list[str] = []

    async def wait(self, name: str) -> None:
        """Users' code that a cancellation finds here, and that takes a moment to clean up."""
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended.append(name)

    async def cancel(self, **spec: object) -> None:
        """Run it, cancel it when it got there, and wait: it must end as cancelled."""
        async with asyncio.timeout(20):
            running = asyncio.create_task(self.run(**spec))
            await self.reached.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    async def run(self, **spec: object) -> Rollout:
        chosen = EnvironmentSpec(name="own", train_tasks=[{"names": "Bob"}], **spec)  # type: ignore[arg-type]
        async with self.rollouter(chosen) as rollouter:
            return await rollouter.run(chosen.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))

    def rollouter(self, spec: EnvironmentSpec, **settings: float) -> Rollouter:
        chosen = RolloutSettings.model_validate(settings)
        environments = loaded(spec, settings=chosen)
        return Rollouter(chosen, environments, renderer=self.renderer, generate=self.generate)


async def ask(task: Task, policy: Policy) -> float:
    await policy.chat([{"role": "user", "content": "hi"}])
    return 1.0


async def test_a_request_is_cancelled_with_its_rollout(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    class Unanswered(ScriptedGenerate):
        async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
            await cancelled.wait("request")
            return await super().__call__(request, on_chunk)

    cancelled.generate = Unanswered(renderer.tokenizer, ["hello"])
    await cancelled.cancel(agent=ask)
    assert cancelled.ended == ["request"]


async def test_a_judge_is_cancelled_and_waited_for(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    async def judge(task: Task, messages: list[Message]) -> float:
        await cancelled.wait("judge")
        return 1.0

    await cancelled.cancel(agent=ask, reward=judge)
    assert cancelled.ended == ["judge"]


async def test_an_environment_is_cancelled_and_waited_for(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    class Waiting:
        async def reset(self, task: Task) -> Observation:
            return Observation.user("go")

        async def step(self, reply: Message) -> Observation:
            await cancelled.wait("step")
            return Observation.end(1.0)

    await cancelled.cancel(environment=Waiting)
    assert cancelled.ended == ["step"]


async def test_parallel_turns_and_tools_are_cancelled_and_waited_for(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    async def agent(task: Task, policy: Policy) -> float:
        async with asyncio.TaskGroup() as group:
            for name in ("one", "two"):
                group.create_task(cancelled.wait(name))
        return 1.0

    await cancelled.cancel(agent=agent)
    assert sorted(cancelled.ended) == ["one", "two"]


async def test_a_tool_that_ignores_the_cancellation_gets_no_further_request(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    cancelled = Cancelled(renderer_of("hermes"), [CALL])
    answered: list[Message] = []

    async def look() -> str:
        cancelled.reached.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "nothing"

    async def agent(task: Task, policy: Policy) -> float:
        messages: list[Message] = [{"role": "user", "content": "look"}]
        while True:
            reply = await policy.chat(messages, tools=[LOOK])
            answered.extend(await answer_tool_calls(reply, {"look": look}))
            messages += [reply.message, *answered]

    await cancelled.cancel(agent=agent)
    assert [message["content"] for message in answered] == ["nothing"]
    assert len(cancelled.generate.calls) == 1


async def test_a_tool_that_goes_on_after_one_cancellation_is_cancelled_again() -> None:
    ended = []

    async def twice() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    attempts = Attempts(cancel_s=0.01)
    running = asyncio.create_task(attempts.run(twice(), what="it", limit_s=60, stop=lambda: None))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [True]
    assert not is_running("it")


async def test_what_an_agent_leaves_running_gets_no_request_once_it_returned(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer, delay_s=0.01)
    background: list[asyncio.Task[float]] = []
    policies: list[Policy] = []

    async def agent(task: Task, policy: Policy) -> float:
        policies.append(policy)
        background.append(asyncio.create_task(ask(task, policy)))
        await ask(task, policy)
        background.append(asyncio.create_task(ask(task, policy)))
        await asyncio.sleep(0)
        return 1.0

    rollout = await cancelled.run(agent=agent)
    await asyncio.gather(*background, return_exceptions=True)
    assert background[1].cancelled()
    calls = len(cancelled.generate.calls)
    with pytest.raises(asyncio.CancelledError):
        await policies[0].chat([{"role": "user", "content": "once more"}])
    assert len(cancelled.generate.calls) == calls
    assert rollout.reward is not None


async def test_a_time_limit_that_an_agent_ignores_ends_its_requests_too(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    async def agent(task: Task, policy: Policy) -> float:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await ask(task, policy)

    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{"names": "Bob"}])
    async with cancelled.rollouter(spec, timeout_s=0.01) as rollouter:
        with pytest.raises(RolloutTimeout, match=r"not finished after 0.01 s"):
            await rollouter.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))
    assert cancelled.generate.calls == []


async def test_group_scoring_is_cancelled_and_waited_for(renderer: ChatRenderer) -> None:
    cancelled = Cancelled(renderer)

    async def rank(group: Group) -> Group:
        await cancelled.wait("rank")
        return group

    spec = EnvironmentSpec(name="own", agent=ask, train_tasks=[{"names": "Bob"}], score_group=rank)
    task = spec.train_task(0)
    group = Group(GroupId("g0"), task, [Rollout(RolloutId("r0"), GroupId("g0"), task, SamplingParams())])
    scoring = asyncio.create_task(cancelled.rollouter(spec).score(group))
    await cancelled.reached.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert cancelled.ended == ["rank"]


class Deaf:
    """Ignores every cancellation until it is told to end."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def listen_to_nobody(self) -> None:
        while not self.told.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.told.wait()


def is_running(what: str) -> bool:
    return any(task.get_name() == what for task in asyncio.all_tasks())


async def test_a_coroutine_that_ignores_every_cancellation_is_left_behind_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts, deaf = Attempts(cancel_s=0.01), Deaf()
    work = attempts.run(deaf.listen_to_nobody(), what="task own/train/0: rollout r0", limit_s=60, stop=lambda: None)
    running = asyncio.create_task(work)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError), caplog.at_level(logging.ERROR, logger="tailrace"):
        await running
    assert is_running("task own/train/0: rollout r0")
    assert "task own/train/0: rollout r0 ignored its cancellation" in caplog.text
    assert "it waits in listen_to_nobody" in caplog.text
    assert __file__ in caplog.text
    deaf.told.set()
    while is_running("task own/train/0: rollout r0"):  # noqa: ASYNC110  (nothing tells of its end)
        await asyncio.sleep(0)


async def test_a_second_cancellation_leaves_it_behind_at_once() -> None:
    attempts, deaf = Attempts(cancel_s=600), Deaf()
    running = asyncio.create_task(attempts.run(deaf.listen_to_nobody(), what="it", limit_s=60, stop=lambda: None))
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_running("it")
    deaf.told.set()


async def test_a_deadline_that_is_ignored_for_good_still_costs_one_rollout_only() -> None:
    attempts, deaf, stopped = Attempts(cancel_s=0.01), Deaf(), []
    with pytest.raises(RolloutTimeout, match=r"it did not end after 0.01 s.*listen_to_nobody"):
        await attempts.run(deaf.listen_to_nobody(), what="it", limit_s=0.01, stop=lambda: stopped.append(True))
    assert stopped == [True]
    deaf.told.set()


async def test_what_cancels_itself_fails(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise asyncio.CancelledError

    cancelled = Cancelled(renderer)
    with pytest.raises(EnvironmentFailed, match=r"own/train/0.*although nobody cancelled it"):
        await cancelled.run(agent=agent)
