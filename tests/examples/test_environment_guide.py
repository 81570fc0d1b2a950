"""The Python blocks of docs/environments.md run, and what they define can be trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tailrace.environments import EnvironmentSpec, Task
from tailrace.records import TaskId
from tests.support.scripted_policy import ScriptedPolicy, calls, play

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def page() -> dict[str, Any]:
    """Names that the page's blocks define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


@pytest.mark.parametrize(
    ("name", "reply", "reward"),
    [
        ("all_but_last", lambda row: "\n".join(sorted(row["names"])[:-1]), 1.0),
        ("all_but_last", lambda row: min(row["names"]), 2 / 3),
        ("guess", lambda row: max(row["names"]), 1.0),
        ("quiz", lambda row: row["answer"], 1.0),
    ],
)
async def test_the_environments_on_the_page_play(page: dict[str, Any], name: str, reply: Any, reward: float) -> None:
    spec: EnvironmentSpec = page[name]
    task = spec.train_task(0)
    assert (await play(spec, task, [reply(task.row)])).reward == reward


async def test_the_class_in_trls_form_on_the_page_counts(page: dict[str, Any]) -> None:
    spec: EnvironmentSpec = page["increments"]
    result = await play(spec, spec.train_task(3), [calls("increment", {"step": 3}), "Done."])
    assert result.metrics == {"near": 0.75, "tool_errors": 0.0}


async def test_the_tool_on_the_page_answers(page: dict[str, Any]) -> None:
    policy = ScriptedPolicy([calls("length", {"word": "sun"}), "3"])
    assert await page["count"](Task(TaskId("t"), "count", 0, {"word": "sun"}), policy) == 0.9 + 0.1
    assert policy.conversations[1][-1]["content"] == "3"


async def test_arguments_of_another_type_come_back_to_the_policy_on_the_page(page: dict[str, Any]) -> None:
    policy = ScriptedPolicy([calls("length", {"word": 5}), "3"])
    assert await page["count"](Task(TaskId("t"), "count", 0, {"word": "sun"}), policy) == 0.9 + 0.1
    told = policy.conversations[1][-1]["content"]
    assert told == "error: length: argument 'word' must be of type string"


@pytest.mark.parametrize(("word", "told"), [("sun", "3"), (5, "error: word must be a string")])
async def test_the_class_with_a_tool_on_the_page_answers_and_ends(
    page: dict[str, Any], word: object, told: str
) -> None:
    spec: EnvironmentSpec = page["counted"]
    policy = ScriptedPolicy([calls("length", {"word": word}), "3"])
    assert spec.environment is not None
    environment = spec.environment()
    messages = [*environment.reset(spec.train_task(0)).messages]
    for _ in range(2):
        reply = await policy.chat(messages, tools=[*spec.tools])
        observation = environment.step(reply.message)
        messages += [reply.message, *observation.messages]
    assert messages[2]["content"] == told
    assert (observation.done, observation.reward) == (True, 1.0)
