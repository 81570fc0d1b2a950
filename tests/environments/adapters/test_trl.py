"""Environment classes and reward functions that were written for TRL run as they are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.environments import EnvironmentSettings, NamedReward, load_environment, trl_environment
from tailrace.errors import DataError, EnvironmentFailed, RolloutTimeout, SettingsError
from tailrace.rollouts import ChatRenderer, RolloutSettings
from tests.environments.adapters.playing import call, play
from tests.support import trl_environments as classes
from tests.support.scripted_policy import calls
from tests.support.scripted_policy import play as play_here

HOME = "tests.support.trl_environments"


async def test_the_documented_class_runs_in_a_worker_as_it_is_and_all_of_a_group_get_its_task(
    renderer: ChatRenderer,
) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:IncrementEnv")
    task = load_environment(environment).train_task(3)
    spec = load_environment(environment)
    opened = (await play_here(spec, task, ["No."])).reward
    played = await play(renderer, environment, [call("increment", step=1), call("increment", step=2), "Done."], times=3)
    asked = [rollout.messages[0]["content"] for rollout in played.rollouts]
    assert len(set(asked)) == 1
    (target,) = re.fullmatch(r"Increment the counter by (\d)\.", asked[0]).groups()  # type: ignore[union-attr]
    assert [one.reward.value for one in played.rollouts if one.reward] == [float(target == "3")] * 3
    assert [message["content"] for message in played.rollouts[0].messages if message["role"] == "tool"] == ["1", "3"]
    assert opened == 0.0


async def test_other_tasks_ask_for_other_targets_and_draws_elsewhere_are_not_disturbed() -> None:
    spec = load_environment(EnvironmentSettings(name=f"{HOME}:IncrementEnv"))
    assert spec.environment is not None
    random.seed(5)
    expected = random.Random(5).random()
    opened = [await spec.environment().reset(spec.train_task(index)) for index in range(40)]  # type: ignore[misc]
    assert random.random() == expected
    assert len({observation.messages[0]["content"] for observation in opened}) == 6
    assert len(spec.eval_tasks) == 200


async def test_a_rollout_without_a_turn_left_is_scored_once_and_errors_of_tools_are_told(
    renderer: ChatRenderer,
) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:given", max_turns=3)
    replies = [call("later", step=3), call("fail"), call("nothing")]
    played = await play(renderer, environment, replies, settings=RolloutSettings(workers=1, max_turns=3))
    rollout = played.rollout
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.components) == (1.0, {"Given": 1.0, "tool_errors": 2.0})
    answers = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert answers == ["3", "{'error': 'broken on purpose'}"]


async def test_rows_reach_reset_and_what_it_returns_follows_the_prompt() -> None:
    assert classes.given.environment is not None
    opened = [
        (await classes.given.environment().reset(classes.given.train_task(index))).messages  # type: ignore[misc]
        for index in range(2)
    ]
    assert opened[0] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "To 3"}]
    assert opened[1] == [{"role": "user", "content": "To 2, please"}]


async def test_a_prompt_is_messages_in_a_list_or_an_array_and_nothing_else_becomes_its_python_text() -> None:
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "To 3"}]
    prompts: list[Any] = [tuple(messages), np.array(messages, object), messages[0]]
    spec = trl_environment(classes.Given, train_tasks=[{"prompt": prompt, "target": 3} for prompt in prompts])
    assert spec.environment is not None
    for index in range(2):
        opened = await spec.environment().reset(spec.train_task(index))  # type: ignore[misc]
        assert opened.messages == messages
    with pytest.raises(DataError, match="has a value of type dict in its column 'prompt'"):
        await spec.environment().reset(spec.train_task(2))  # type: ignore[misc]


async def test_rewards_add_up_and_may_look_at_the_environment(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:said")
    played = await play(renderer, environment, [call("say", word="yes"), "I said it."])
    assert played.rollout.reward is not None
    components = {"said_so": 1.0, "brief": 1 / 3, "tool_errors": 0.0}
    assert played.rollout.reward.components == components
    assert played.rollout.reward.value == pytest.approx(0.5 + 1 / 3)


async def test_an_answer_that_the_rows_prompt_shows_is_no_completion(renderer: ChatRenderer) -> None:
    played = await play(renderer, EnvironmentSettings(name=f"{HOME}:shown_before"), ["I said it."])
    assert played.rollout.reward is not None
    assert played.rollout.reward.value == 3000 + len("I said it.")


async def test_functions_of_the_settings_add_to_the_classes_own_reward(renderer: ChatRenderer) -> None:
    rewards: Any = {"brief": {"function": f"{HOME}:brief", "weight": 0.5}}
    environment = EnvironmentSettings(name=f"{HOME}:Coroutines", rewards=rewards)
    played = await play(renderer, environment, [call("push") + "\n" + call("push"), "Done."])
    assert played.rollout.reward is not None
    assert played.rollout.reward.value == pytest.approx(2 / 4 + 0.5 / 4)


async def test_what_a_tool_does_to_its_arguments_does_not_change_what_was_recorded(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:Coroutines")
    rollout = (await play(renderer, environment, [call("order", numbers=[2, 1]), "Done."])).rollout
    (recorded,) = rollout.messages[1]["tool_calls"]
    assert recorded["function"]["arguments"] == {"numbers": [2, 1]}
    assert rollout.messages[2]["content"] == "[1, 2]"


async def test_a_class_takes_arguments_of_the_settings(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:Given", args={"bonus": 2}, data="examples/names.jsonl")
    with pytest.raises(Exception, match="has no column 'target'"):
        load_environment(environment)


async def test_columns_of_the_settings_are_the_classes_attributes_where_it_has_them(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HOME}:IncrementEnv", columns=("counter", "elsewhere"))
    rollout = (await play(renderer, environment, [call("increment", step=2), "Done."])).rollout
    assert rollout.reward is not None
    assert rollout.reward.columns == {"counter": 2}


async def test_a_judge_alone_may_score_a_class(renderer: ChatRenderer) -> None:
    judge: Any = {"rubric": "Say it."}
    environment = EnvironmentSettings(name=f"{HOME}:Scoreless", judge=judge)
    played = await play(renderer, environment, [call("say", word="yes"), "Done."])
    assert played.spec.judge is not None
    assert (played.rollout.reward, played.rollout.metrics["tool_errors"]) == (None, 0.0)


async def test_a_tool_that_never_returns_costs_its_rollout(renderer: ChatRenderer) -> None:
    settings = RolloutSettings(workers=1, worker_timeout_s=3)
    with pytest.raises(RolloutTimeout, match="step of the environment did not return"):
        await play(renderer, EnvironmentSettings(name=f"{HOME}:said"), [call("say", word="stall")], settings=settings)


async def test_an_image_costs_its_rollout_and_says_why() -> None:
    replies = [calls("look", {"at": "text"}), "Done."]
    assert (await play_here(classes.given, classes.given.train_task(0), replies)).reward == 0.0
    with pytest.raises(ExceptionGroup) as raised:
        await play_here(classes.given, classes.given.train_task(0), [calls("look", {"at": "image"})])
    assert raised.group_contains(EnvironmentFailed, match="content of type 'image'; the policy reads text alone")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: trl_environment(classes.Scoreless), "nothing scores it"),
        (lambda: trl_environment(classes.Untold), "tool Untold.increment has no docstring"),
        (lambda: trl_environment({"a": classes.IncrementEnv}), r"several \[\[environments\]\] of the run"),  # type: ignore[arg-type]
        (lambda: trl_environment(object), "object has no method `reset`"),
        (lambda: trl_environment(classes.IncrementEnv, train_tasks=[{"image": "x"}]), "column 'image'"),
        (lambda: trl_environment(classes.IncrementEnv, rewards=[classes.brief, classes.brief]), "the same name"),
        (lambda: trl_environment(classes.Scoreless, rewards=[classes.given_state]), "completion_ids"),
        (
            lambda: trl_environment(classes.Scoreless, rewards={"one": NamedReward(classes.said_so, together=True)}),
            "looks at `environments`, .*: leave `together` out",
        ),
        (lambda: load_environment(EnvironmentSettings(name=f"{HOME}:Scoreless")), "nothing scores it"),
        (lambda: load_environment(EnvironmentSettings(name=f"{HOME}:IncrementEnv", args={"b": 1})), "args.b"),
    ],
)
def test_what_cannot_be_done_is_told_when_it_is_loaded(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()


def test_a_column_that_a_function_beside_the_environment_takes_is_one_that_every_row_needs() -> None:
    def said(environments: list[Any], word: list[str]) -> list[float]:
        return [0.0]

    spec = trl_environment(classes.Scoreless, train_tasks=[{"prompt": "Say it."}], rewards=[said])
    with pytest.raises(DataError, match=r"no column 'word', .*its columns are: prompt"):
        spec.train_task(0)


def test_a_function_of_the_settings_cannot_look_at_environments() -> None:
    rewards: Any = {"said": {"function": f"{HOME}:said_so"}}
    with pytest.raises(SettingsError, match="looks at `environments`"):
        load_environment(EnvironmentSettings(name=f"{HOME}:IncrementEnv", rewards=rewards))
