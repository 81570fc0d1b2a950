from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tailrace.environments import AgentResult, EnvironmentSpec, Observation, Policy
from tailrace.errors import (
    BudgetExceeded,
    EngineFailed,
    EnvironmentFailed,
    InvalidReward,
    RequestRefused,
    RolloutError,
    RolloutTimeout,
    ScoringFailed,
    SettingsError,
)
from tailrace.records import Group, GroupId, Message, Reward, Rollout, RolloutId, Task
from tailrace.rollouts import ChatRenderer, Rollouter, RolloutSettings
from tests.support.collected import left_to_collector
from tests.support.loaded import loaded
from tests.support.scripted_generate import ScriptedGenerate

ROWS = [{"names": "Bob, Ada"}]


class Sorting:
    """Three turns; each right answer earns a third."""

    async def reset(self, task: Task) -> Observation:
        self.turn = 0
        return Observation.user(task["names"])

    async def step(self, reply: Message) -> Observation:
        self.turn += 1
        reward = float(reply["content"] == "Ada, Bob") / 3
        if self.turn < 3:
            return Observation.user("again", reward=reward)
        end = Observation.end(reward, metrics={"turns": 3.0}, columns={"note": "ok"})
        return replace(end, messages=[{"role": "user", "content": "thanks"}])


sorting = EnvironmentSpec(name="sorting", environment=Sorting, train_tasks=ROWS, columns=("turn",))


def spec_of(agent: Callable[..., object], **more: object) -> EnvironmentSpec:
    return EnvironmentSpec(name="own", agent=agent, train_tasks=ROWS, **more)  # type: ignore[arg-type]


async def ask(task: Task, policy: Policy) -> float:
    await policy.chat([{"role": "user", "content": task["names"]}])
    return 1.0


async def run(
    renderer: ChatRenderer,
    spec: EnvironmentSpec,
    replies: Sequence[str | Exception] = ("Ada, Bob",),
    *,
    delay_s: float = 0.0,
    rollout_id: str = "r0",
    **settings: object,
) -> Rollout:
    chosen = RolloutSettings.model_validate(settings)
    generate = ScriptedGenerate(renderer.tokenizer, replies, delay=lambda: delay_s)
    async with Rollouter(chosen, loaded(spec, settings=chosen), renderer=renderer, generate=generate) as rollouter:
        return await rollouter.run(spec.train_task(0), rollout_id=RolloutId(rollout_id), group_id=GroupId("g0"))


async def test_an_environments_rewards_add_up_over_its_turns(renderer: ChatRenderer) -> None:
    rollout = await run(renderer, sorting, ["Ada, Bob", "Bob, Ada", "Ada, Bob"])
    assert rollout.reward == Reward(pytest.approx(2 / 3), {"turns": 3.0}, {"note": "ok", "turn": 3})
    assert rollout.turns == 3
    assert [message["content"] for message in rollout.messages[-2:]] == ["Ada, Bob", "thanks"]
    assert len(rollout.branches) == 1
    assert rollout.ended_s >= rollout.started_s
    assert {"generate_s", "environment_s"} <= set(rollout.metrics)


async def test_an_environment_ends_with_its_reward_so_far_where_no_turn_is_left(renderer: ChatRenderer) -> None:
    rollout = await run(renderer, sorting, max_turns=2)
    assert rollout.turns == 2
    assert rollout.reward is not None
    assert rollout.reward.value == pytest.approx(2 / 3)


async def test_columns_of_the_settings_that_a_rollout_did_not_report_are_left_out(renderer: ChatRenderer) -> None:
    async def reward(task: Task, messages: list[Message]) -> AgentResult:
        return AgentResult(0.5, info={"why": "brief"})

    spec = replace(sorting, info_keys=("note", "why", "turn"))
    ended, cut = await run(renderer, spec), await run(renderer, spec, max_turns=2)
    assert ended.reward == Reward(pytest.approx(1.0), {"turns": 3.0}, {"note": "ok", "turn": 3})
    assert cut.reward == Reward(pytest.approx(2 / 3), {}, {"turn": 2})
    scored = await run(renderer, replace(spec, reward=reward), max_turns=2)
    assert scored.reward == Reward(0.5, {}, {"why": "brief", "turn": 2})


async def test_an_attribute_that_the_spec_itself_names_must_be_there(renderer: ChatRenderer) -> None:
    for info_keys in (None, ("turns",)):
        with pytest.raises(SettingsError, match="Sorting has no attribute 'turns'"):
            await run(renderer, replace(sorting, columns=("turns",), info_keys=info_keys))


async def test_a_first_prompt_that_does_not_fit_costs_the_rollout(renderer: ChatRenderer) -> None:
    with pytest.raises(RequestRefused, match="too long"):
        await run(renderer, sorting, [RequestRefused("too long")])


async def test_an_agent_is_scored_by_what_it_returns(renderer: ChatRenderer) -> None:
    assert (await run(renderer, spec_of(ask))).reward == Reward(1.0)


@pytest.mark.parametrize(
    "returned", [AgentResult(0.5, {"effort": 2}, {"said": "hi"}), Reward(0.5, {"effort": 2}, {"said": "hi"})]
)
async def test_a_result_and_a_reward_are_two_forms_of_the_same(renderer: ChatRenderer, returned: object) -> None:
    async def agent(task: Task, policy: Policy) -> object:
        await ask(task, policy)
        return returned

    async def reward(task: Task, messages: list[Message]) -> object:
        return returned

    for spec in (spec_of(agent), spec_of(ask, reward=reward)):
        assert (await run(renderer, spec)).reward == Reward(0.5, {"effort": 2.0}, {"said": "hi"})


async def test_a_result_without_a_reward_is_kept_for_whoever_scores_the_group(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> AgentResult:
        await ask(task, policy)
        return AgentResult(metrics={"effort": 2.0}, info={"said": "hi"})

    async def rank(group: Group) -> Group:
        return group

    rollout = await run(renderer, spec_of(agent, score_group=rank))
    assert rollout.reward is None
    assert (rollout.metrics["effort"], rollout.metadata) == (2.0, {"said": "hi"})
    with pytest.raises(InvalidReward, match=r"is None \(NoneType\); it must be a number"):
        await run(renderer, spec_of(agent))


async def test_a_metric_that_is_no_number_costs_its_rollout_and_not_the_group_that_would_give_it_a_reward(
    renderer: ChatRenderer,
) -> None:
    async def agent(task: Task, policy: Policy) -> AgentResult:
        await ask(task, policy)
        return AgentResult(metrics={"effort": float("nan")})

    async def rank(group: Group) -> Group:
        return group

    with pytest.raises(InvalidReward, match=r"rollout r0, component 'effort', is nan; it must be finite"):
        await run(renderer, spec_of(agent, score_group=rank))


async def test_a_reward_function_takes_precedence_and_keeps_what_the_agent_reported(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> Reward:
        await ask(task, policy)
        return Reward(0.1, components={"effort": 2.0})

    async def reward(task: Task, messages: list[Message]) -> float:
        return float(messages[-1]["content"] == "Ada, Bob")

    rollout = await run(renderer, spec_of(agent, reward=reward))
    assert rollout.reward == Reward(1.0, components={"effort": 2.0})
    assert "score_s" in rollout.metrics


async def test_an_environment_without_rewards_keeps_its_columns_for_the_reward_function(renderer: ChatRenderer) -> None:
    class Plain:
        async def reset(self, task: Task) -> Observation:
            return Observation.user("go")

        async def step(self, reply: Message) -> Observation:
            return Observation.end(metrics={"steps": 1.0}, columns={"seen": reply["content"]})

    async def reward(task: Task, messages: list[Message]) -> float:
        return 0.5

    spec = EnvironmentSpec(name="plain", environment=Plain, train_tasks=ROWS)
    assert (await run(renderer, replace(spec, reward=reward))).reward == Reward(
        0.5, {"steps": 1.0}, {"seen": "Ada, Bob"}
    )
    with pytest.raises(InvalidReward, match=r"is None \(NoneType\); it must be a number"):
        await run(renderer, spec)


async def test_what_an_agent_said_before_its_budget_ended_can_still_be_scored(renderer: ChatRenderer) -> None:
    async def chatter(task: Task, policy: Policy) -> None:
        messages: list[Message] = [{"role": "user", "content": "talk"}]
        while True:
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": "more"}]

    async def reward(task: Task, messages: list[Message]) -> float:
        return float(len(messages))

    assert (await run(renderer, spec_of(chatter, reward=reward), max_turns=3)).reward == Reward(6.0)
    with pytest.raises(BudgetExceeded, match="max_turns"):
        await run(renderer, spec_of(chatter), max_turns=3)


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -1.4e217, 10**39, "good", None, [1.0], Reward(float("nan"))]
)
async def test_a_reward_that_is_no_number_of_float32_costs_the_rollout(renderer: ChatRenderer, bad: object) -> None:
    async def agent(task: Task, policy: Policy) -> object:
        await ask(task, policy)
        return bad

    with pytest.raises(InvalidReward, match="task own/train/0: the reward of rollout r0 is"):
        await run(renderer, spec_of(agent))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (AgentResult(1.0, info="note"), "AgentResult.info is 'note'"),  # type: ignore[arg-type]
        (AgentResult(1.0, info=None), "AgentResult.info is None"),  # type: ignore[arg-type]
        (AgentResult(1.0, metrics=[1.0]), r"AgentResult.metrics is \[1.0\]"),  # type: ignore[arg-type]
        (Reward(1.0, columns="x"), "Reward.columns is 'x'"),  # type: ignore[arg-type]
        (Reward(1.0, components=None), "Reward.components is None"),  # type: ignore[arg-type]
    ],
)
async def test_what_comes_with_a_reward_and_is_no_dict_costs_the_rollout(
    renderer: ChatRenderer, bad: object, field: str
) -> None:
    async def agent(task: Task, policy: Policy) -> object:
        await ask(task, policy)
        return bad

    async def score_group(group: Group) -> Group:
        group.rollouts[0].reward = bad  # type: ignore[assignment]
        return group

    async def score_each(group: Group) -> list[object]:
        return [bad for _ in group.rollouts]

    with pytest.raises(InvalidReward, match=f"task own/train/0: {field}"):
        await run(renderer, spec_of(agent))
    for score in (score_group, score_each):
        if score is score_each and isinstance(bad, Reward):
            continue
        with pytest.raises(InvalidReward, match=f"task own/train/0: {field}"):
            await TestScoringAGroup().score(renderer, score)


async def test_what_an_agent_raises_names_the_task_and_the_line(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise KeyError("oh")

    with pytest.raises(EnvironmentFailed, match=r"(?s)task own/train/0: KeyError: 'oh'.*test_rollouter.py") as raised:
        await run(renderer, spec_of(agent))
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.reason == "environment_failed"


class Large:
    """What an agent holds."""


async def raise_with(large: Large) -> None:
    raise ValueError(f"no {large}")


async def raise_what_is_kept_with(large: Large) -> None:
    error = ValueError(f"no {large}")
    raise error


async def raise_in_parallel_with(large: Large) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raise_with(large))


async def refuse_in_parallel_with(large: Large) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(refuse_with(large))


async def refuse_with(large: Large) -> None:
    raise RequestRefused(f"no {large}")


async def overrun_with(large: Large) -> None:
    async with asyncio.timeout(0):
        await wait_with(large)


async def wait_with(large: Large) -> None:
    await asyncio.get_running_loop().create_future()
    del large


async def exit_with(large: Large) -> None:
    sys.exit(f"no {large}")


@contextlib.contextmanager
def freed_without_collector() -> Iterator[list[Large]]:
    """Of what whoever pops it holds, nothing is left."""
    held = [Large()]
    is_left = weakref.ref(held[0])
    gc.disable()
    try:
        with pytest.raises((RolloutError, RequestRefused)):
            yield held
        assert is_left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "fails",
    [
        *(raise_with, raise_what_is_kept_with, raise_in_parallel_with, refuse_in_parallel_with),
        *(overrun_with, wait_with, exit_with),
    ],
)
async def test_what_a_rollout_that_failed_held_is_freed_without_the_collector(
    renderer: ChatRenderer, fails: Callable[[Large], Awaitable[None]]
) -> None:
    with freed_without_collector() as held:

        async def agent(task: Task, policy: Policy) -> None:
            await fails(held.pop())

        await run(renderer, spec_of(agent), timeout_s=0.2)


async def test_what_a_reward_held_that_failed_is_freed_where_its_rollout_stays_unscored(renderer: ChatRenderer) -> None:
    held = [Large()]
    is_left = weakref.ref(held[0])

    async def score(task: Task, messages: list[Message]) -> float:
        await raise_with(held.pop())
        return 1.0

    with left_to_collector(Large) as left:
        rollout = await run(renderer, spec_of(ask, reward=score), score_errors={"on_error": "keep_unscored"})
    assert rollout.reward is None
    assert (left, is_left()) == ([], None)


class Speechless(ConnectionError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class SpeechlessShop(EnvironmentFailed):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [Speechless(), SpeechlessShop()])
async def test_an_error_that_cannot_say_what_it_is_costs_its_rollout_alone(
    renderer: ChatRenderer, error: Exception
) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise error

    with pytest.raises(EnvironmentFailed, match=r"task own/train/0: .*<its text cannot be had: RuntimeError>"):
        await run(renderer, spec_of(agent))


async def test_a_reward_that_fails_to_become_a_number_names_its_task(renderer: ChatRenderer) -> None:
    class OnNoDevice:
        ndim = 0

        def item(self) -> float:
            raise RuntimeError("no data")

    async def agent(task: Task, policy: Policy) -> object:
        return OnNoDevice()

    with pytest.raises(EnvironmentFailed, match="task own/train/0: RuntimeError: no data"):
        await run(renderer, spec_of(agent))


class ShopClosed(EnvironmentFailed):
    reason = "shop_closed"

    def __init__(self, name: str, *, status: int) -> None:
        super().__init__(f"{name} answers {status}")


async def test_an_error_of_a_users_own_class_names_the_task_and_keeps_its_reason(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise ShopClosed("shop", status=503)

    with pytest.raises(EnvironmentFailed, match="task own/train/0: shop answers 503") as raised:
        await run(renderer, spec_of(agent))
    assert isinstance(raised.value.__cause__, ShopClosed)
    assert raised.value.reason == "shop_closed"


async def test_a_missing_column_is_one_clear_message(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        return float(task["answer"])

    with pytest.raises(EnvironmentFailed, match="has no column 'answer'; its columns are: names") as raised:
        await run(renderer, spec_of(agent))
    assert raised.value.is_mistake


@pytest.mark.parametrize(
    "error", [ConnectionError("away"), ValueError("no JSON"), ExceptionGroup("2", [KeyError()] * 2)]
)
async def test_what_an_outage_brings_about_is_no_mistake(renderer: ChatRenderer, error: Exception) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise error

    with pytest.raises(EnvironmentFailed) as raised:
        await run(renderer, spec_of(agent))
    assert not raised.value.is_mistake


async def empty_chat(task: Task, policy: Policy) -> float:
    await policy.chat([])
    return 1.0


async def no_tokens(task: Task, policy: Policy) -> float:
    await policy.chat([{"role": "user", "content": "hi"}], max_tokens=-1)
    return 1.0


async def leaves(task: Task, policy: Policy) -> float:
    sys.exit(1)


async def returns_nothing(task: Task, policy: Policy) -> None:
    await ask(task, policy)


async def returns_text(task: Task, policy: Policy) -> str:
    return "1.0"


async def returns_infinity(task: Task, policy: Policy) -> float:
    return float("inf")


@pytest.mark.parametrize(
    ("agent", "is_mistake"),
    [
        (empty_chat, True),
        (no_tokens, True),
        (leaves, True),
        (returns_nothing, True),
        (returns_text, True),
        (returns_infinity, False),
    ],
)
async def test_what_only_wrong_code_does_is_a_mistake(
    renderer: ChatRenderer, agent: Callable[..., object], is_mistake: bool
) -> None:
    with pytest.raises(RolloutError) as raised:
        await run(renderer, spec_of(agent))
    assert raised.value.is_mistake is is_mistake


async def test_a_rollout_that_outlives_its_time_limit_is_lost_and_says_where(renderer: ChatRenderer) -> None:
    async def sleepy_reward(task: Task, messages: list[Message]) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RolloutTimeout, match=r"own/train/0: not finished after 0.5 s.*waiting in sleepy_reward"):
        await run(renderer, spec_of(ask, reward=sleepy_reward), timeout_s=0.5)


async def test_a_timeout_of_the_agents_own_is_the_agents_failure(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        raise TimeoutError("their socket")

    with pytest.raises(EnvironmentFailed, match="their socket"):
        await run(renderer, spec_of(agent))


async def test_an_engines_failure_is_not_the_rollouts(renderer: ChatRenderer) -> None:
    with pytest.raises(EngineFailed):
        await run(renderer, sorting, [EngineFailed("out of memory")])


@pytest.mark.parametrize("error", [EngineFailed("gone"), RequestRefused("too long")])
async def test_parallel_turns_fail_with_the_error_itself(renderer: ChatRenderer, error: Exception) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        async with asyncio.TaskGroup() as turns:
            for _ in range(2):
                turns.create_task(policy.chat([{"role": "user", "content": "hi"}]))
        return 1.0

    with pytest.raises(type(error)):
        await run(renderer, spec_of(agent), [error])


async def test_cancelling_a_rollout_is_never_swallowed(renderer: ChatRenderer) -> None:
    running = asyncio.create_task(run(renderer, sorting, delay_s=60))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("how", ["fails", "outlives its limit", "is cancelled"])
async def test_how_long_a_lost_rollout_took_is_known(renderer: ChatRenderer, how: str) -> None:
    has_begun = asyncio.Event()

    async def agent(task: Task, policy: Policy) -> float:
        has_begun.set()
        await asyncio.sleep(0.01)
        if how == "fails":
            raise ValueError("in the end")
        await asyncio.Event().wait()
        return 1.0

    settings = RolloutSettings(max_tokens=32, timeout_s=0.1 if how == "outlives its limit" else 300)
    spec, took_s = spec_of(agent), list[float]()
    generate = ScriptedGenerate(renderer.tokenizer, [])
    async with Rollouter(settings, loaded(spec, settings=settings), renderer=renderer, generate=generate) as rollouter:
        runner = rollouter.runner(on_lost=lambda lost: took_s.append(lost.ended_s - lost.started_s))
        running = asyncio.create_task(
            runner.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))
        )
        if how == "is cancelled":
            await has_begun.wait()
            await asyncio.sleep(0.01)
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [one > 0.005 for one in took_s] == [True]


async def test_an_environment_that_returns_no_observation_is_told(renderer: ChatRenderer) -> None:
    class Wrong(Sorting):
        async def step(self, reply: Message) -> Observation:
            return 0.5  # type: ignore[return-value]

    spec = EnvironmentSpec(name="wrong", environment=Wrong, train_tasks=ROWS)
    with pytest.raises(
        EnvironmentFailed, match=r"wrong/train/0: reset and step return an Observation.*a float"
    ) as raised:
        await run(renderer, spec)
    assert raised.value.is_mistake


async def test_untrusted_synchronous_code_needs_settings_to_be_made_again_from(renderer: ChatRenderer) -> None:
    spec = spec_of(ask, reward=lambda task, messages: 1.0)
    with pytest.raises(SettingsError, match="it was not loaded from settings"):
        await run(renderer, spec)
    assert (await run(renderer, replace(spec, trusted=True))).reward == Reward(1.0)


class TestScoringAGroup:
    async def score(self, renderer: ChatRenderer, score_group: object, **settings: object) -> list[Group]:
        spec = spec_of(ask, score_group=score_group)
        rollouts = [await run(renderer, spec, rollout_id=name) for name in ("r0", "r1")]
        group = Group(GroupId("g0"), spec.train_task(0), rollouts)
        generate = ScriptedGenerate(renderer.tokenizer, ["-"])
        chosen = RolloutSettings.model_validate(settings)
        environments = loaded(spec, settings=chosen)
        async with Rollouter(chosen, environments, renderer=renderer, generate=generate) as rollouter:
            return await rollouter.score(group)

    async def test_rewards_may_be_changed(self, renderer: ChatRenderer) -> None:
        async def rank(group: Group) -> Group:
            for place, rollout in enumerate(group.rollouts):
                rollout.reward = Reward(place)
            return group

        (scored,) = await self.score(renderer, rank)
        assert scored.rewards == [0.0, 1.0]

    async def test_a_group_may_be_split_or_discarded(self, renderer: ChatRenderer) -> None:
        async def split(group: Group) -> list[Group]:
            return [replace(group, group_id=f"{n}", rollouts=[rollout]) for n, rollout in enumerate(group.rollouts)]

        async def discard(group: Group) -> None:
            return None

        assert len(await self.score(renderer, split)) == 2
        assert await self.score(renderer, discard) == []
        assert len(await self.score(renderer, None)) == 1

    async def test_a_reward_that_is_no_number_fails_the_group(self, renderer: ChatRenderer) -> None:
        async def spoil(group: Group) -> Group:
            group.rollouts[0].reward = None
            return group

        with pytest.raises(InvalidReward, match=r"own/train/0.*is missing"):
            await self.score(renderer, spoil)

    async def test_what_it_held_where_it_failed_is_freed_without_the_collector(self, renderer: ChatRenderer) -> None:
        with freed_without_collector() as held:

            async def broken(group: Group) -> None:
                await raise_what_is_kept_with(held.pop())

            await self.score(renderer, broken)

    async def test_what_it_raises_names_the_task(self, renderer: ChatRenderer) -> None:
        async def broken(group: Group) -> Group:
            raise RuntimeError("judge is down")

        with pytest.raises(ScoringFailed, match="own/train/0: RuntimeError: judge is down"):
            await self.score(renderer, broken)

    async def test_it_has_a_time_limit(self, renderer: ChatRenderer) -> None:
        async def hang(group: Group) -> Group:
            await asyncio.Event().wait()
            return group

        for setting in ("reward_timeout_s", "timeout_s"):
            told = rf"own/train/0: not finished after 0.05 s \(rollouts\.{setting}\)"
            with pytest.raises(RolloutTimeout, match=told):
                await self.score(renderer, hang, **{setting: 0.05})

    async def test_something_else_than_groups_is_refused(self, renderer: ChatRenderer) -> None:
        async def wrong(group: Group) -> float:
            return 1.0

        with pytest.raises(ScoringFailed, match="own/train/0: score_group returned a float"):
            await self.score(renderer, wrong)
