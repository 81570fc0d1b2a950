"""Agents of others, as they are: each does a task with two tools, and what is recorded is what was sampled."""

from __future__ import annotations

import pytest

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.models.loading import tokenizer_folder
from tailrace.records import SamplingParams
from tailrace.rollouts import ChatRenderer
from tests.support.bundled_models import BUNDLED
from tests.support.framework_agents import ADD, AGENTS, PACKAGES, QUESTION, REPLIES, handed_over
from tests.support.served_policies import Served, served

LONG = SamplingParams(max_tokens=256)
REWRITES = ("smolagents", "smolagents_in_few_words")
"""They tell the model's calls again as text, so that every turn is a conversation of its own."""


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(tokenizer_folder(BUNDLED, tmp_path_factory.mktemp("tokenizer")))


async def _solved(bundled: ChatRenderer, name: str, replies: tuple[str, ...]) -> tuple[str, Served]:
    pytest.importorskip(PACKAGES.get(name, "openai"))
    async with served(bundled, replies, sampling=LONG, max_turns=len(replies)) as talk:
        return await AGENTS[name](talk.endpoint, QUESTION), talk


async def test_the_example_of_the_agents_sdk_looks_seats_up_and_is_rewarded(bundled: ChatRenderer) -> None:
    pytest.importorskip("agents")
    spec = load_environment(EnvironmentSettings(name="examples.own_agents_sdk:seats"))
    assert spec.agent is not None
    calls = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{"name": "Max"}}}}</tool_call>'
        for name in ("left_of", "right_of")
    )
    async with served(bundled, [calls, "Karl\nAda"], sampling=LONG) as talk:
        assert await spec.agent(spec.train_task(0), talk.policy) == 1.0
    assert [message["content"] for message in talk.rollout.messages if message["role"] == "tool"] == ["Karl", "Ada"]
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize(("speaks", "nests"), [("responses", True), ("responses", False), ("chat", True)])
async def test_an_agent_that_another_hands_over_to_has_a_branch_of_its_own(
    bundled: ChatRenderer, speaks: str, nests: bool
) -> None:
    """It is told a conversation that ends with an assistant's message."""
    pytest.importorskip("agents")
    over = 'I ask.<tool_call>{"name": "transfer_to_adder", "arguments": {}}</tool_call>'
    async with served(bundled, [over, ADD, "It is 7."], sampling=LONG, max_turns=3) as talk:
        assert await handed_over(talk.endpoint, "What is 3 + 4?", speaks=speaks, nests=nests) == "It is 7."
    assert [len(branch.completion_spans) for branch in talk.rollout.branches] == [1, 2]
    assert talk.rollout.messages[-4]["role"] == "assistant"
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in REWRITES])
async def test_an_agent_calls_two_tools_and_answers_on_one_branch(bundled: ChatRenderer, name: str) -> None:
    answer, talk = await _solved(bundled, name, REPLIES)
    assert answer == "It is 35."
    assert [message["content"] for message in talk.rollout.messages if message["role"] == "tool"] == ["7", "35"]
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    assert talk.rollout.metrics["tool_calls"] == 2
    talk.assert_recorded_as_sampled()


async def test_smolagents_tells_calls_again_as_text_so_that_each_turn_is_a_branch(bundled: ChatRenderer) -> None:
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "35"}}</tool_call>'
    answer, talk = await _solved(bundled, "smolagents", (*REPLIES[:2], final))
    assert answer == "35"
    assert len(talk.rollout.branches) == 3
    assert talk.rollout.metrics["rewritten_turns"] == 2
    talk.assert_recorded_as_sampled()
