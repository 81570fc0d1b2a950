"""The built-in environments reward what they say they reward."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.environments import EnvironmentSettings, EnvironmentSpec, Json, load_environment
from tailrace.environments.answers import extract_number, text_similarity
from tailrace.environments.calculator import evaluate
from tailrace.environments.generated import GeneratedRows, is_held_out
from tailrace.environments.results import as_agent_result
from tailrace.errors import SettingsError, ToolError
from tests.support.scripted_policy import Said, ScriptedPolicy, calls, play


def load(name: str, **args: Json) -> EnvironmentSpec:
    return load_environment(EnvironmentSettings(name=name, args=args))


async def test_reverse_text_rewards_by_likeness() -> None:
    spec = load("reverse-text", min_words=2, max_words=2)
    task = spec.train_task(11)
    assert task["answer"] == task["text"][::-1]
    assert (await play(spec, task, [task["answer"]])).reward == 1.0
    assert 0 < (await play(spec, task, [task["text"]])).reward < 1
    assert (await play(spec, task, [""])).reward == 0.0


def test_a_reply_that_goes_on_and_on_earns_almost_nothing() -> None:
    assert text_similarity("ab" * 10_000, "abab") < 0.001


@given(st.text(max_size=20), st.text(max_size=20))
def test_likeness_is_from_zero_to_one_and_one_only_for_the_same_text(produced: str, expected: str) -> None:
    ratio = text_similarity(produced, expected)
    assert 0 <= ratio <= 1
    assert (ratio == 1) == (produced == expected)


@pytest.mark.parametrize("terms", [2, 4])
async def test_arithmetic_rewards_the_right_number_alone(terms: int) -> None:
    spec = load("arithmetic", terms=terms, operators=["+", "-", "*"])
    for index in range(30):
        task = spec.train_task(index)
        assert evaluate(task["expression"]) == str(task["answer"])
        assert (await play(spec, task, [f"That makes {task['answer']}."])).reward == 1.0
        assert (await play(spec, task, [f"{task['answer'] + 1}"])).reward == 0.0
        assert (await play(spec, task, ["I do not know"])).reward == 0.0


def test_arithmetic_refuses_what_makes_no_expression() -> None:
    with pytest.raises(SettingsError, match="terms = 1"):
        load("arithmetic", terms=1)
    with pytest.raises(SettingsError, match=r"environment\.args\.operators"):
        load("arithmetic", operators=["/"])


@pytest.mark.parametrize("question", ["only one", "just this"])
def test_rows_with_too_few_different_questions_say_so(question: str) -> None:
    missing = not is_held_out(question)
    is_eval = lambda row: is_held_out(row["q"])  # noqa: E731
    rows = GeneratedRows(lambda rng: {"q": question}, is_eval=is_eval, seed=0, size=10, held_out=missing)
    with pytest.raises(SettingsError, match="too few different questions"):
        rows[0]


async def test_the_calculator_is_called_and_its_result_comes_back() -> None:
    spec = load("calculator")
    task = spec.train_task(0)
    policy = ScriptedPolicy([calls("calculator", {"expression": task["expression"]}), f"It is {task['answer']}"])
    assert spec.agent is not None
    result = as_agent_result(await spec.agent(task, policy))
    assert (result.reward, result.metrics) == (1.0, {"tool_calls": 1, "tool_errors": 0})
    assert policy.conversations[1][-1] == {
        "role": "tool",
        "name": "calculator",
        "content": str(task["answer"]),
        "tool_call_id": "call-1",
    }
    assert [tool["name"] for tool in policy.tools[0] or []] == ["calculator"]


@pytest.mark.parametrize(
    "mistake",
    [
        calls("calculator", {"expression": "__import__('os').system('true')"}),
        calls("calculator", {"expresion": "1 + 1"}),
        calls("calculator", "not json"),
        calls("calculator", "[1]"),
        calls("abacus", {"expression": "1 + 1"}),
        Said("<tool_call>{broken", malformed_tool_calls=1),
    ],
)
async def test_a_wrong_tool_call_comes_back_as_a_message_and_the_rollout_goes_on(mistake: Said) -> None:
    spec = load("calculator")
    task = spec.train_task(0)
    result = await play(spec, task, [mistake, str(task["answer"])])
    assert (result.reward, result.metrics["tool_errors"]) == (1.0, 1)


async def test_a_policy_that_only_ever_calls_the_tool_ends_at_the_turn_cap() -> None:
    spec = load("calculator", max_turns=3)
    task = spec.train_task(0)
    result = await play(spec, task, [calls("calculator", {"expression": task["expression"]})] * 3)
    assert (result.reward, result.metrics["tool_calls"]) == (0.0, 3)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("-(2 - 5)", "3"), ("7 // 2", "3"), ("7 % 4", "3"), ("2 ** 10", "1024"), ("1 / 4", "0.25")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "9**9**9",
        "10 ** 64",
        "(-8) ** 0.5",
        "a + 1",
        "1" * 300,
        "(" * 150,
        "0 ** -1",
        "1 2",
        [1],
        "1j",
    ],
)
def test_the_calculator_refuses_the_rest_at_once(expression: Json) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=40))
def test_the_calculator_answers_or_refuses_whatever_it_is_given(expression: str) -> None:
    with contextlib.suppress(ToolError):
        assert float(evaluate(expression)) < 1e31


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("<answer>-3.5</answer> 7", -3.5),
        ("first 1\nthen 2\n", 2),
        ("12,345 apples", 12345),
        ("<answer>9", 9),
        ("", None),
    ],
)
def test_the_number_of_an_answer_is_found(reply: str, number: float | None) -> None:
    assert extract_number(reply) == number
