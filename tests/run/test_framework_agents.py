"""Agents of others, as they are, learn: their requests are the rollouts that the policy is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.runs import require_rise, run_inline
from tests.support.framework_agents import AGENTS, PACKAGES

STEPS, WINDOW = 8, 3
MARGIN = 0.1
SETTINGS = (
    *("--environment.name", "tests.support.framework_environments:brief", "--max_steps", str(STEPS)),
    *("--rollouts.group_size", "8", "--rollouts.max_tokens", "32", "--rollouts.max_turns", "3"),
    *("--scheduling.batch_size", "32", "--scheduling.row_tokens", "1024", "--generator.slots", "32"),
    *("--generator.max_cache_tokens", "1024", "--rollouts.timeout_s", "200"),
)
QUICK = "openai_agents"
LONG = ("openai_chat", "openai_responses", "anthropic_messages", "langgraph", "smolagents_in_few_words")


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
async def test_the_reward_of_an_agent_of_others_rises(tmp_path: Path, name: str) -> None:
    """The mean reward of the last steps is above that of the first ones, by more than chance."""
    pytest.importorskip(PACKAGES.get(name, "openai"))
    assert name in AGENTS
    summary = await run_inline(tmp_path, *SETTINGS, "--environment.args", f"{{ framework = '{name}' }}")
    assert summary.steps == STEPS, summary
    require_rise(tmp_path / "run", steps=STEPS, window=WINDOW, margin=MARGIN)
