"""A spec says what it lacks; a task row without its column is named."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tailrace.environments import (
    EnvironmentSpec,
    Json,
    Message,
    NamedReward,
    Observation,
    Policy,
    Task,
    single_turn_agent,
)
from tailrace.environments.protocol import read_attributes
from tailrace.errors import DataError, SettingsError
from tailrace.records import TaskId
from tests.support.scripted_policy import ScriptedPolicy


async def agent(task: Task, policy: Policy) -> float:
    return 0.0


class Counter:
    count = 7

    def reset(self, task: Task) -> Observation:
        return Observation.user("go on")

    def step(self, reply: object) -> Observation:
        return Observation.end(reward=1.0)


def test_a_spec_needs_an_agent_or_an_environment() -> None:
    with pytest.raises(SettingsError, match="has neither"):
        EnvironmentSpec(name="empty")


def test_a_spec_takes_not_both_an_agent_and_an_environment() -> None:
    with pytest.raises(SettingsError, match="has both"):
        EnvironmentSpec(name="double", agent=agent, environment=Counter)


def test_eval_tasks_are_given_or_held_out_never_both() -> None:
    with pytest.raises(SettingsError, match="both `eval_tasks` and `held_out` = 2"):
        EnvironmentSpec(name="unsure", agent=agent, eval_tasks=[{"n": 1}], held_out=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent": "my:agent"}, r"`agent` is 'my:agent' \(str\); it must be a function"),
        ({"environment": Counter()}, r"`environment` is .* \(Counter\); .* give the class itself"),
        ({"agent": agent, "reward": 5}, r"`reward` is 5 \(int\); it must be a function"),
        ({"agent": agent, "rewards": {"right": agent}}, r"`rewards\['right'\]` is .* NamedReward\(function, weight="),
        ({"agent": agent, "rewards": [agent]}, r"`rewards` is .* \(list\); it must be a dict of names, each with its"),
        ({"agent": agent, "held_out": -1}, r"`held_out` is -1 \(int\); it must be a number of rows, 0 or above"),
        ({"agent": agent, "required_columns": "prompt"}, r"`required_columns` is 'prompt' \(str\); .* \('prompt',\)"),
    ],
)
def test_a_field_of_another_kind_is_told_when_the_spec_is_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=f"environment 'odd': {message}"):
        EnvironmentSpec(name="odd", **fields)  # type: ignore[arg-type]


def test_a_row_without_a_required_column_names_task_column_and_what_it_has() -> None:
    spec = EnvironmentSpec(
        name="sums", agent=agent, train_tasks=[{"prompt": "1+1", "solution": 2}], required_columns=("prompt", "answer")
    )
    with pytest.raises(DataError, match=r"task sums/train/0 has no column 'answer', .* its columns are: prompt, sol"):
        spec.train_task(0)


def test_a_row_needs_what_a_named_reward_takes_without_a_default() -> None:
    def right(prompts: object, completions: object, answer: object, unit: str = "m", **columns: object) -> list[float]:
        return [1.0]

    def near(completions: object, trainer_state: object, *, answer: object) -> list[float]:
        return [1.0]

    rows: list[dict[str, object]] = [{"answer": 2}, {"solution": 2}]
    for reward in (right, near, listed):
        spec = EnvironmentSpec(name="sums", agent=agent, train_tasks=rows, rewards={"one": NamedReward(reward)})
        assert spec.train_task(0)["answer"] == 2
        if reward is not listed:
            with pytest.raises(DataError, match=r"task sums/train/1 has no column 'answer', .* columns are: solution"):
                spec.train_task(1)


def test_a_row_that_maps_nothing_is_refused() -> None:
    spec = EnvironmentSpec(name="sums", agent=agent, train_tasks=["1+1"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="task sums/train/0 is a str"):
        spec.train_task(0)


def test_named_attributes_of_an_environment_can_be_saved() -> None:
    assert read_attributes(Counter(), ["count"]) == {"count": 7}


def test_an_attribute_to_save_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="Counter has no attribute 'total'"):
        read_attributes(Counter(), ["total"])


def test_an_optional_attribute_that_is_not_there_is_left_out() -> None:
    assert read_attributes(Counter(), [], ["total", "count"]) == {"count": 7}


class Awaited:
    async def reset(self, task: Task) -> Observation:
        return Observation.user("go on")

    async def step(self, reply: object) -> Observation:
        return Observation.end(reward=1.0)


class Judging:
    async def __call__(self, task: Task, messages: list[Message]) -> float:
        return 1.0


def check(task: Task, messages: list[Message]) -> float:
    return 1.0


def listed(**columns: object) -> list[float | None]:
    return [1.0]


@pytest.mark.parametrize(
    ("needs", "parts"),
    [
        (False, {"agent": agent}),
        (False, {"environment": Awaited}),
        (False, {"environment": partial(Awaited), "reward": Judging()}),
        (True, {"environment": Counter}),
        (True, {"agent": agent, "reward": check}),
        (True, {"environment": Awaited, "rewards": {"one": NamedReward(listed)}}),
        (False, {"environment": Counter, "reward": check, "trusted": True}),
    ],
)
def test_only_synchronous_code_that_is_not_trusted_needs_workers(needs: bool, parts: dict[str, object]) -> None:
    assert EnvironmentSpec(name="own", **parts).needs_workers == needs  # type: ignore[arg-type]


async def test_a_single_turn_begins_with_a_text_or_with_the_messages_of_a_conversational_data_set() -> None:
    asked = {"role": "user", "content": "2"}
    prompts: list[Json] = ["2", 2, np.int64(2), [asked], (asked,), np.array([asked], object)]
    policy = ScriptedPolicy(["a"] * len(prompts))
    agent = single_turn_agent(system_prompt="Be brief.")
    for prompt in prompts:
        await agent(Task(TaskId("t"), "any", 0, {"prompt": prompt}), policy)
    assert policy.conversations == [[{"role": "system", "content": "Be brief."}, asked]] * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (None, "null"),
        ({"role": "user", "content": "Why?"}, "a value of type dict"),
        (["Why?"], "a value of type list"),
        (np.array(["Why?"]), "a value of type ndarray"),
        (b"Why?", "a value of type bytes"),
    ],
)
async def test_a_single_turn_has_nothing_to_ask_where_the_column_holds_no_text_and_no_messages(
    prompt: Json, found: str
) -> None:
    policy = ScriptedPolicy(["a"])
    with pytest.raises(DataError, match=f"task t has {found} in its column 'prompt'.* text, or a list of messages"):
        await single_turn_agent()(Task(TaskId("t"), "any", 0, {"prompt": prompt}), policy)
    assert policy.conversations == []


async def test_examples_come_before_a_single_turn_as_turns_of_their_own() -> None:
    policy = ScriptedPolicy(["5"])
    agent = single_turn_agent(system_prompt="Be brief.", few_shot=[("1 + 1?", "2"), ("3 - 1?", "2")])
    await agent(Task(TaskId("t"), "any", 0, {"prompt": "2 + 3?"}), policy)
    said = [(message["role"], message["content"]) for message in policy.conversations[0]]
    examples = [("user", "1 + 1?"), ("assistant", "2"), ("user", "3 - 1?"), ("assistant", "2")]
    assert said[:6] == [("system", "Be brief."), *examples, ("user", "2 + 3?")]


def test_a_single_turn_names_the_column_that_every_row_needs() -> None:
    rows = [{"question": "Why?"}]
    spec = EnvironmentSpec(name="any", agent=single_turn_agent(prompt="question"), train_tasks=rows)
    assert spec.train_task(0)["question"] == "Why?"
    other = EnvironmentSpec(name="any", agent=single_turn_agent(), train_tasks=rows)
    with pytest.raises(DataError, match=r"task any/train/0 has no column 'prompt', which .* its columns are: question"):
        other.train_task(0)
