"""Rewards as weighted sums of named functions in TRL's form, on the loop and in workers that can be killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tailrace.environments import (
    Agent,
    EnvironmentSettings,
    EnvironmentSpec,
    Message,
    NamedReward,
    Observation,
    Policy,
    Task,
    load_environment,
)
from tailrace.environments.named_rewards import ScoredRollout, TrainerState, checked_values, weighted_sum
from tailrace.errors import EnvironmentFailed, InvalidReward, RolloutError, RolloutTimeout, SettingsError
from tailrace.records import Group, GroupId, Reward, Rollout, RolloutId, SamplingParams, TaskId, ToolSpec
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutSettings
from tailrace.rollouts.run_facts import RunFacts
from tests.support.chat_models import CHATML, save_chat_model
from tests.support.loaded import loaded
from tests.support.scripted_generate import ScriptedGenerate

MODULE = "tests.support.named_rewards"
MAX_STEPS = 160
ADDS = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ADD: ToolSpec = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


def chosen(name: str = "plain", **rewards: object) -> EnvironmentSettings:
    return EnvironmentSettings.model_validate({"name": f"{MODULE}:{name}", "rewards": rewards})


def function(name: str, weight: float = 1.0) -> dict[str, object]:
    return {"function": f"{MODULE}:{name}", "weight": weight}


class Scored:
    """A rollouter over one environment, loaded from its settings as a run does."""

    def __init__(self, renderer: ChatRenderer, environment: EnvironmentSettings, **settings: object) -> None:
        self.spec: EnvironmentSpec = load_environment(environment)
        self._settings = RolloutSettings.model_validate(settings)
        self._rollouter = Rollouter(
            self._settings,
            {self.spec.name: LoadedEnvironment.of(self.spec, self._settings, environment)},
            renderer=renderer,
            generate=ScriptedGenerate(renderer.tokenizer, ["yes"]),
            facts=RunFacts(max_steps=MAX_STEPS),
        )

    async def __aenter__(self) -> Scored:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._rollouter.close()

    async def score(self, group: Group) -> list[Group]:
        return await self._rollouter.score(group)

    async def run(self, word: str = "fine") -> Rollout:
        index = [row["word"] for row in self.spec.train_tasks].index(word)
        task = self.spec.train_task(index)
        return await self._rollouter.run(task, rollout_id=RolloutId(f"r{index}"), group_id=GroupId("g0"))


async def test_sync_and_async_functions_add_up_by_weight_and_none_adds_nothing(renderer: ChatRenderer) -> None:
    async with Scored(renderer, chosen("named")) as scored:
        fine, short = await scored.run("fine"), await scored.run("short")
    assert fine.reward == Reward(pytest.approx(1 + 0.05 + 0.5), {"right": 1.0, "fine": 0.5, "slow": 0.25})
    assert short.reward == Reward(pytest.approx(1.5), {"right": 1.0, "slow": 0.25})
    assert "score_s" in fine.metrics


async def test_synchronous_functions_run_in_another_process_unless_they_are_trusted(renderer: ChatRenderer) -> None:
    environment = chosen(pid=function("where"))
    async with Scored(renderer, environment) as scored:
        assert scored.spec.needs_workers
        apart = (await scored.run()).reward
    async with Scored(renderer, environment.model_copy(update={"trusted": True})) as scored:
        here = (await scored.run()).reward
    assert here == Reward(float(os.getpid()), {"pid": float(os.getpid())})
    assert apart is not None
    assert apart != here


def test_a_function_gets_what_its_parameters_name() -> None:
    def of_the_row(word: list[str]) -> list[float]:
        return [float(len(one)) for one in word]

    def of_the_reply(completions: list[list[Message]]) -> list[float]:
        return [float(len(one)) for one in completions]

    def of_the_prompt(prompts: list[list[Message]], *, trainer_state: TrainerState) -> list[float]:
        return [float(len(one) + trainer_state.max_steps) for one in prompts]

    task = Task(TaskId("own/train/0"), "own", 0, {"word": "fine", "prompt": "not a column"})
    rollout = ScoredRollout([*SHOWN, said("assistant", "six")], len(SHOWN))
    values = [
        NamedReward(function).call([task], [rollout], TrainerState(max_steps=10))
        for function in (of_the_row, of_the_reply, of_the_prompt)
    ]
    assert values == [[4.0], [1.0], [13.0]]


@pytest.mark.parametrize("trusted", [False, True])
async def test_functions_get_the_tokens_of_completions_and_where_training_is(
    renderer: ChatRenderer, trusted: bool
) -> None:
    environment = chosen(tokens=function("tokens"), alone=function("ids_alone"))
    async with Scored(renderer, environment.model_copy(update={"trusted": trusted})) as scored:
        rollout = await scored.run()
    sampled = renderer.tokenizer.encode("yes")
    assert rollout.reward is not None
    assert rollout.reward.components == {
        "tokens": 1000 * (len(sampled) + 1) + MAX_STEPS + sampled[0] / 100,  # the stop token is one of them
        "alone": len(sampled) + 1,
    }


def said(role: Literal["system", "user", "assistant", "tool"], content: str) -> Message:
    return {"role": role, "content": content}


SHOWN = [said("user", "2+2?"), said("assistant", "four"), said("user", "3+3?")]
"""A prompt that shows how to answer."""


async def ask_once(_: Task, policy: Policy) -> None:
    await policy.chat(SHOWN)


async def prefill(_: Task, policy: Policy) -> None:
    await policy.chat(SHOWN[:2])


async def ask_twice(_: Task, policy: Policy, *, temperature: float | None = None) -> None:
    reply = await policy.chat(SHOWN)
    await policy.chat([*SHOWN, reply.message, said("user", "go on")], temperature=temperature)


async def ask_twice_shortened(_: Task, policy: Policy) -> None:
    reply = await policy.chat(SHOWN)
    await policy.chat([*SHOWN, said("assistant", f"{reply.content}\n"), said("user", "go on")], temperature=0.5)


async def answer_and_call_a_tool(_: Task, policy: Policy) -> None:
    reply = await policy.chat(SHOWN)
    await policy.chat([*SHOWN, reply.message, said("user", "go on")], tools=[ADD])


async def call_a_tool(_: Task, policy: Policy) -> None:
    reply = await policy.chat(SHOWN, tools=[ADD])
    await policy.chat([*SHOWN, reply.message, said("tool", "6")], tools=[ADD])


async def call_a_tool_and_answer_without_any(_: Task, policy: Policy) -> None:
    reply = await policy.chat(SHOWN, tools=[ADD])
    await policy.chat([*SHOWN, reply.message, said("tool", "6")])


async def ask_a_sub_agent_last(_: Task, policy: Policy) -> None:
    await policy.chat([said("user", "plan")])
    await policy.chat(SHOWN)


async def ask_a_sub_agent_between(_: Task, policy: Policy) -> None:
    first = await policy.chat(SHOWN)
    await policy.chat([said("user", "help")])
    await policy.chat([*SHOWN, first.message, said("user", "go on")])


async def demonstrate_last(_: Task, policy: Policy) -> None:
    await policy.chat(SHOWN)
    policy.demonstrate([*SHOWN, said("assistant", "six")])


async def demonstrate_in_vain_first(_: Task, policy: Policy) -> None:
    policy.demonstrate([*SHOWN, said("assistant", "six")], weight=0.0)  # a branch that is left out in the end
    await policy.chat(SHOWN)


async def start_anew(_: Task, policy: Policy) -> None:
    reply = await policy.chat([said("user", "long ago")])
    await policy.chat([said("user", "in short"), said("assistant", f"I said {reply.content}"), said("user", "3+3?")])


@pytest.mark.parametrize(
    ("agent", "num_prompt", "completion"),
    [
        (ask_once, 3, ["one"]),
        (prefill, 2, ["one"]),
        (ask_twice, 3, ["one", "go on", "two"]),
        (partial(ask_twice, temperature=0.5), 3, ["one", "go on", "two"]),
        (call_a_tool, 3, ["one", "6", "two"]),
        (ask_a_sub_agent_last, 3, ["two"]),
        (ask_a_sub_agent_between, 3, ["one", "go on", "three"]),
        (demonstrate_last, 3, ["one"]),
        (demonstrate_in_vain_first, 3, ["one"]),
        (start_anew, 3, ["two"]),
    ],
)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
async def test_a_completion_begins_with_the_policys_first_reply_and_not_with_one_that_its_prompt_shows(
    renderer: ChatRenderer, agent: Agent, num_prompt: int, completion: list[str], together: bool
) -> None:
    seen = await seen_of(renderer, agent, together=together)
    assert len(seen["prompts"]) == num_prompt
    assert [message["content"] for message in seen["completions"]] == completion
    assert renderer.tokenizer.decode(seen["completion_ids"]) == in_chatml(seen["completions"])


async def test_a_turn_that_has_but_the_text_of_those_before_begins_the_tokens_and_not_the_completion(
    renderer: ChatRenderer,
) -> None:
    seen = await seen_of(renderer, call_a_tool_and_answer_without_any)
    assert len(seen["prompts"]) == 3
    assert [message["content"] for message in seen["completions"]] == ["one", "6", "two"]
    assert renderer.tokenizer.decode(seen["completion_ids"]) == "two<|im_end|>"


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("agent", "model", "replies", "completion"),
    [
        (ask_once, "chatml", [f"{THOUGHT}one"], [f"{THOUGHT}one"]),
        (ask_once, "qwen3", [f"{THOUGHT}one"], [f"{THOUGHT}one"]),
        (ask_once, "chatml", [f"{THOUGHT}{ADDS}"], [f"{THOUGHT}{ADDS}"]),
        (ask_twice, "chatml", [f"{THOUGHT}one", "two"], [f"{THOUGHT}one", "go on", "two"]),
        (ask_twice_shortened, "chatml", [f"{THOUGHT}one", f"{THOUGHT}2"], [f"{THOUGHT}one", "go on", f"{THOUGHT}2"]),
        (partial(ask_twice, temperature=0.5), "chatml", [f"{THOUGHT}one", "two"], [f"{THOUGHT}one", "go on", "two"]),
        (ask_a_sub_agent_last, "chatml", [f"{THOUGHT}one", "two"], ["two"]),
        (call_a_tool, "chatml", [f"{THOUGHT}one{ADDS}", f"{THOUGHT}two"], ["one", "6", "two"]),
        (call_a_tool_and_answer_without_any, "chatml", [f"{THOUGHT}one", f"{THOUGHT}2"], ["one", "6", f"{THOUGHT}2"]),
        (answer_and_call_a_tool, "chatml", [f"{THOUGHT}one", f"{THOUGHT}2"], [f"{THOUGHT}one", "go on", "2"]),
    ],
)
async def test_functions_see_replies_as_they_were_sampled_with_their_reasoning_unless_calls_are_read(
    renderer_of: Callable[[str], ChatRenderer],
    agent: Agent,
    model: str,
    replies: list[str],
    completion: list[str],
) -> None:
    seen = await seen_of(renderer_of(model), agent, replies=replies)
    assert [message["content"] for message in seen["completions"]] == completion


async def test_where_the_prompt_opens_the_reasoning_a_completion_begins_inside_of_it(tmp_path: Path) -> None:
    opens = CHATML.replace("assistant\n", "assistant\n<think>\n")
    seen = await seen_of(ChatRenderer(save_chat_model(tmp_path, template=opens)), ask_once, replies=["hm</think>one"])
    assert seen["completions"] == [said("assistant", "hm</think>one")]


async def test_the_agent_sees_reasoning_apart(renderer: ChatRenderer) -> None:
    heard: list[Message] = []

    async def agent(_: Task, policy: Policy) -> None:
        reply = await policy.chat(SHOWN)
        heard.extend([reply.message, *policy.messages[len(SHOWN) :]])

    await seen_of(renderer, agent, replies=[f"{THOUGHT}one"])
    assert heard == [{**said("assistant", "one"), "reasoning_content": "hm"}] * 2


def in_chatml(messages: list[Message]) -> str:
    """From the first reply's own first token to the last one's stop token."""
    whole = "\n".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>" for message in messages)
    return whole.removeprefix("<|im_start|>assistant\n")


async def seen_of(
    renderer: ChatRenderer, agent: Agent, *, replies: Sequence[str] = ("one", "two", "three"), together: bool = False
) -> dict[str, Any]:
    """What a named function is given of this agent's rollout."""
    seen: dict[str, Any] = {}

    async def look(**given: list[Any]) -> list[float]:
        seen.update({name: given[name][0] for name in ("prompts", "completions", "completion_ids")})
        return [1.0]

    rewards = {"look": NamedReward(look, together=together)}
    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{}], rewards=rewards)
    generate = ScriptedGenerate(renderer.tokenizer, replies)
    async with Rollouter(RolloutSettings(), loaded(spec), renderer=renderer, generate=generate) as rollouter:
        task, group_id = spec.train_task(0), GroupId("g0")
        rollout = await rollouter.run(task, rollout_id=RolloutId("r0"), group_id=group_id)
        if together:
            await rollouter.score(Group(group_id, task, [rollout]))
    return seen


async def test_a_function_that_never_returns_costs_one_rollout_and_not_the_others(renderer: ChatRenderer) -> None:
    async with Scored(renderer, chosen(one=function("troubled")), worker_timeout_s=3.0) as scored:
        assert (await scored.run()).reward == Reward(1.0, {"one": 1.0})
        with pytest.raises(RolloutTimeout, match=r"the reward functions did not return within 3 s.*was killed"):
            await scored.run("hang")
        assert (await scored.run()).reward == Reward(1.0, {"one": 1.0})


async def test_a_checker_that_computes_for_long_stalls_nothing_but_its_own_process(renderer: ChatRenderer) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async with Scored(renderer, chosen(one=function("troubled"))) as scored:
        await scored.run()
        ticking = asyncio.create_task(tick())
        await scored.run("hold")
        ticking.cancel()
    assert ticks > 100


@pytest.mark.parametrize(
    ("word", "error", "told"),
    [
        ("raise", EnvironmentFailed, "ZeroDivisionError: of the user"),
        ("nan", InvalidReward, "a value of reward function 'one' is nan; it must be finite"),
        ("short", InvalidReward, "'one' returned 0 values for 1 completions"),
        ("none", InvalidReward, "'one' returned a float for 1 completions"),
    ],
)
async def test_what_is_no_list_of_numbers_costs_the_rollout(
    renderer: ChatRenderer, word: str, error: type[RolloutError], told: str
) -> None:
    async with Scored(renderer, chosen(one=function("troubled"))) as scored:
        with pytest.raises(error, match=told):
            await scored.run(word)


async def test_a_rollout_that_no_function_applies_to_has_no_reward(renderer: ChatRenderer) -> None:
    async with Scored(renderer, chosen(none=function("inapplicable"))) as scored:
        with pytest.raises(InvalidReward, match="none of none applies to it"):
            await scored.run()
    kept = {"score_errors": {"on_error": "keep_unscored"}}
    async with Scored(renderer, chosen(none=function("inapplicable")), **kept) as scored:
        assert (await scored.run()).reward is None


def group_of(spec: EnvironmentSpec, *replies: str, reward: Reward | None = None) -> Group:
    task = spec.train_task(0)
    rollouts = [
        Rollout(
            RolloutId(f"0.{place}"),
            GroupId("0"),
            task,
            SamplingParams(),
            messages=[{"role": "user", "content": "fine"}, {"role": "assistant", "content": reply}],
            reward=reward,
        )
        for place, reply in enumerate(replies)
    ]
    return Group(GroupId("0"), task, rollouts)


async def test_functions_that_compare_the_rollouts_of_a_group_see_them_together(renderer: ChatRenderer) -> None:
    environment = chosen(longest={**function("longest", 0.5), "together": True})
    async with Scored(renderer, environment) as scored:
        assert (await scored.run()).reward is None  # it comes with the group's
        own = group_of(scored.spec, "short", "longer", "", reward=Reward(1.0, {"own": 1.0}))
        (group,) = await scored.score(own)
        assert group.rewards == [1.0, 1.5, 1.0]
        assert [len(rollout.reward.components) for rollout in group.rollouts if rollout.reward] == [2, 2, 1]
        with pytest.raises(InvalidReward, match=r"rollout 0\.1 is missing: none of longest applies") as raised:
            await scored.score(group_of(scored.spec, "something", ""))
        assert not raised.value.is_mistake  # it says so itself of this completion, and worked


async def test_what_an_environment_reports_is_kept_where_a_group_gives_the_reward(renderer: ChatRenderer) -> None:
    class Plain:
        async def reset(self, task: Task) -> Observation:
            return Observation.user("go")

        async def step(self, reply: Message) -> Observation:
            return Observation.end(metrics={"steps": 1.0}, columns={"seen": reply["content"]})

    async def rank(group: Group) -> Group:
        return group

    spec = EnvironmentSpec(name="own", environment=Plain, train_tasks=[{"word": "fine"}], score_group=rank)
    generate = ScriptedGenerate(renderer.tokenizer, ["yes"])
    async with Rollouter(RolloutSettings(), loaded(spec), renderer=renderer, generate=generate) as rollouter:
        rollout = await rollouter.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))
    assert rollout.reward is None
    assert (rollout.metrics["steps"], rollout.metadata) == (1.0, {"seen": "yes"})


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
async def test_a_reward_of_the_agents_own_that_named_ones_replace_is_told_of_once(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        await policy.chat([{"role": "user", "content": "go"}])
        return 0.25

    async def one(prompts: object, completions: list[object], **columns: object) -> list[float]:
        return [1.0] * len(completions)

    rewards = {"one": NamedReward(one, together=together)}
    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{"word": "fine"}], rewards=rewards)
    generate = ScriptedGenerate(renderer.tokenizer, ["yes"])
    async with Rollouter(RolloutSettings(), loaded(spec), renderer=renderer, generate=generate) as rollouter:
        for number in range(2):
            name = RolloutId(f"r{number}")
            rollout = await rollouter.run(spec.train_task(0), rollout_id=name, group_id=GroupId("g0"))
            assert rollout.reward == (None if together else Reward(1.0, {"one": 1.0}))
    assert [one.message for one in caplog.records if "not used" in one.message] == [
        "environment 'own' reports rewards of its own, which are not used: the weighted sum of one takes their place"
    ]


def test_settings_add_functions_and_weigh_the_environments_own_anew() -> None:
    spec = load_environment(chosen("named", slow={"weight": 0.5}, extra=function("where", 0.0)))
    assert {name: reward.weight for name, reward in spec.rewards.items()} == {
        "right": 1.0,
        "fine": 0.1,
        "slow": 0.5,
        "extra": 0.0,
    }


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"function": f"{MODULE}:rihgt"},
            r"environment.rewards.one.function is .*has no 'rihgt'; did you mean",
        ),
        ({"function": "no_such_module:f"}, r"environment.rewards.one.function is .*there is no module"),
        ({"function": f"{MODULE}:ROWS"}, "is not a function"),
        ({"weight": 2.0}, "names no function, and environment 'plain' has no reward of that name"),
    ],
)
def test_a_wrong_function_is_told_before_a_run_starts(told: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_environment(chosen(one=told))


def test_a_reward_and_rewards_contradict_each_other() -> None:
    async def agent(task: object, policy: object) -> None:
        return None

    with pytest.raises(SettingsError, match="both `reward` and `rewards`"):
        EnvironmentSpec(name="own", agent=agent, reward=lambda *_: 1.0, rewards={"one": NamedReward(print)})


def test_numbers_of_other_libraries_are_numbers() -> None:
    import numpy as np

    assert checked_values(np.array([0.5, 1.0]), 2, "one") == [0.5, 1.0]
    assert checked_values([np.float32(0.5), None], 2, "one") == [0.5, None]


def test_nothing_that_applies_is_no_sum() -> None:
    assert weighted_sum({"one": None}, {"one": NamedReward(print)}).reward is None
