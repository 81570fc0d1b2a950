"""reasoning-gym's data sets come in by name and configuration, and score by themselves."""

from __future__ import annotations

import json
import sys

import pytest

from tailrace.config import load_settings
from tailrace.environments import EnvironmentSettings, EnvironmentSpec, Json, Task, load_environment
from tailrace.errors import SettingsError
from tests.support.scripted_policy import ScriptedPolicy, play

pytest.importorskip("reasoning_gym")


def load(**args: Json) -> EnvironmentSpec:
    return load_environment(EnvironmentSettings(name="reasoning-gym", args=args))


async def test_a_right_answer_earns_its_data_sets_own_score() -> None:
    spec = load(dataset="basic_arithmetic", max_terms=2, max_digits=2)
    task = spec.train_task(4)
    assert (await play(spec, task, [f"Let me think. <answer>{task['answer']}</answer>"])).reward == 1.0
    assert (await play(spec, task, [f"So it is\n{task['answer']}"])).reward == 1.0
    assert (await play(spec, task, ["<answer>no</answer>"])).reward < 1.0


@pytest.mark.parametrize("dataset", ["knights_knaves", "rearc", "spell_backward", "word_ladder", "zebra_puzzles"])
async def test_a_task_scores_the_same_after_travelling_as_json(dataset: str) -> None:
    task = load(dataset=dataset, size=400, eval_size=4).train_task(3)
    arrived = Task(task.task_id, task.environment, task.index, json.loads(json.dumps(task.row)), task.seed)
    result = await play(load(dataset=dataset, size=400, eval_size=4), arrived, [f"<answer>{task['answer']}</answer>"])
    assert result.reward == 1.0


async def test_the_policy_is_asked_with_reasoning_gyms_own_system_prompt() -> None:
    spec = load(dataset="basic_arithmetic")
    policy = ScriptedPolicy(["1"])
    assert spec.agent is not None
    await spec.agent(spec.train_task(0), policy)
    assert [message["role"] for message in policy.conversations[0]] == ["system", "user"]
    assert "<answer>" in policy.conversations[0][0]["content"]


@pytest.mark.parametrize(("given", "count"), [([], 3), (["--environment.args.few_shot", "[]"], 1)])
async def test_the_recipes_examples_come_before_every_question(given: list[str], count: int) -> None:
    settings = load_settings("smollm2-arithmetic", given)
    spec = load_environment(settings.environments[0])
    policy, task = ScriptedPolicy(["1"]), spec.train_task(0)
    assert spec.agent is not None
    await spec.agent(task, policy)
    said = policy.conversations[0]
    assert [message["role"] for message in said] == ["system", *["user", "assistant"] * (count - 1), "user"]
    assert [message["content"] for message in said if message["role"] == "user"][-1] == task["question"]
    assert not {message["content"] for message in said} & {spec.eval_task(index)["question"] for index in range(200)}


def test_held_out_questions_are_never_trained_on() -> None:
    spec = load(dataset="basic_arithmetic", max_terms=2, max_digits=1, size=1_000, eval_size=20)
    train = {spec.train_task(index)["question"] for index in range(len(spec.train_tasks))}
    assert not train & {spec.eval_task(index)["question"] for index in range(20)}


def test_a_row_is_the_same_each_time_it_is_asked_for() -> None:
    first, second = load(dataset="leg_counting"), load(dataset="leg_counting")
    assert first.train_task(7) == second.train_task(7)
    assert first.eval_task(7) == second.eval_task(7)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("prime_factorization", "a few primes"), ("game_of_life", "{}"), ("boxnet", "[[]]"), ("coin_flip", "1e999")],
)
async def test_an_answer_that_scoring_cannot_read_is_wrong_and_counted(dataset: str, answer: str) -> None:
    spec = load(dataset=dataset)
    result = await play(spec, spec.train_task(0), [f"<answer>{answer}</answer>"])
    assert (result.reward, result.metrics["unreadable"]) == (0.0, 1.0)


def test_its_scoring_is_untrusted() -> None:
    assert not load(dataset="puzzle24").trusted


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"dataset": "basic_arithmetik"}, "did you mean 'basic_arithmetic'"),
        ({"dataset": "basic_arithmetic", "max_digit": 2}, "environment.args.max_digit: .* did you mean 'max_digits'"),
        ({"dataset": "basic_arithmetic", "max_digits": "two"}, "environment.args.max_digits of basic_arithmetic"),
        ({"dataset": "basic_arithmetic", "min_digits": 9}, "refuses its configuration: max_digits must be"),
        ({}, "environment.args.dataset is missing"),
    ],
)
def test_a_wrong_data_set_or_field_is_told_with_the_right_one(args: dict[str, Json], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(**args)


PARTS = [{"name": "chain_sum", "weight": 2, "config": {}}, {"name": "leg_counting", "weight": 1, "config": {}}]


async def test_a_composite_mixes_data_sets_and_each_scores_its_own() -> None:
    spec = load(dataset="composite", datasets=PARTS, size=400, eval_size=8)
    tasks = [spec.train_task(index) for index in range(60)]
    results = [await play(spec, task, [f"<answer>{task['answer']}</answer>"]) for task in tasks]
    assert [result.reward for result in results] == [1.0] * len(tasks)
    named = [next(iter(result.metrics.keys() - {"unreadable"})) for result in results]
    assert named.count("chain_sum") > named.count("leg_counting") > 0
    assert len(spec.eval_tasks) == 8


async def test_levels_of_a_curriculum_are_mixed_evenly_and_told_apart() -> None:
    spec = load(dataset="chain_sum", levels=[0, 3], size=120, eval_size=8, min_terms=2)
    tasks = [spec.train_task(index) for index in range(60)]
    results = [await play(spec, task, [f"<answer>{task['answer']}</answer>"]) for task in tasks]
    length: dict[str, list[int]] = {"level_0": [], "level_3": []}
    for task, result in zip(tasks, results, strict=True):
        assert result.reward == 1.0
        length[next(iter(result.metrics.keys() - {"unreadable"}))].append(len(task["question"]))
    assert min(len(one) for one in length.values()) > 15
    assert max(length["level_0"]) < max(length["level_3"])


@pytest.mark.parametrize("levels", [[0, 3], [0, 1, 2]])
def test_held_out_tasks_are_an_even_mix_of_the_levels_and_no_two_are_the_same_entry(levels: list[int]) -> None:
    spec = load(dataset="chain_sum", levels=levels, size=3_000, eval_size=59)
    entries = [int(row["source_index"]) for row in spec.eval_tasks]
    assert len(set(entries)) == len(spec.eval_tasks) == 59
    assert max(entries) < 3_000
    assert [index % len(levels) for index in entries] == [place % len(levels) for place in range(59)]


def test_there_are_no_more_held_out_tasks_than_the_questions_give() -> None:
    spec = load(dataset="chain_sum", size=1_000, eval_size=200)
    entries = [int(row["source_index"]) for row in spec.eval_tasks]
    assert len(set(entries)) == len(entries) == 20


@pytest.mark.parametrize("args", [{"size": 40}, {"eval_size": 0}])
def test_none_is_held_out_of_the_questions_to_train_on(args: dict[str, Json]) -> None:
    assert len(load(dataset="chain_sum", **args).eval_tasks) == 0
    with pytest.raises(SettingsError, match=r"no held-out task, where environment\.eval_tasks asks for 10"):
        load_environment(
            EnvironmentSettings(name="reasoning-gym", args={"dataset": "chain_sum", **args}, eval_tasks=10)
        )


@pytest.mark.parametrize("levels", [[0, 3], [3, 0]])
def test_a_level_with_too_few_different_questions_is_told_before_the_run(levels: list[int]) -> None:
    with pytest.raises(SettingsError, match="questions held no held-out one"):
        load(dataset="coin_flip", levels=levels, size=1000, eval_size=20)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"dataset": "composite"}, "refuses its configuration: Must specify at least one dataset"),
        ({"dataset": "composite", "datasets": [{"name": "sums", "weight": 1, "config": {}}]}, "'sums' not registered"),
        ({"dataset": "composite", "datasets": PARTS, "levels": [0]}, "composite has no curriculum"),
        ({"dataset": "chain_sum", "levels": [99]}, "the levels of chain_sum are 0 to"),
        ({"dataset": "chain_sum", "levels": []}, "name one or more"),
    ],
)
def test_what_a_mix_cannot_have_is_told(args: dict[str, Json], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(**args)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(SettingsError, match=r'pip install "tailrace\[reasoning-gym\]"'):
        load(dataset="basic_arithmetic")
