"""Claude Code and Codex, as npm has them: each runs a command, and tells what it printed.

`make npm-agents` installs them; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tailrace.environments import Endpoint
from tailrace.models.loading import tokenizer_folder
from tailrace.records import SamplingParams
from tailrace.rollouts import ChatRenderer
from tests.support.bundled_models import BUNDLED
from tests.support.served_policies import Served, served

pytestmark = pytest.mark.long

INSTALLED = Path(__file__).parents[2] / ".npm-agents" / "node_modules" / ".bin"
PATIENCE_S = 200
BASH = '<tool_call>{"name": "Bash", "arguments": {"command": "echo $((3 + 4))", "description": "Adds"}}</tool_call>'
EXECUTE = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo $((3 + 4))"}}</tool_call>'
ANSWER = "It is 7."
QUESTION = "What is 3 + 4? Ask the shell."


def program(name: str) -> str:
    """Where it is installed; the test is skipped where it is not."""
    found = shutil.which(name, path=str(INSTALLED)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make npm-agents")
    return found


def policy(tmp_path: Path, call: str, **settings: str) -> AbstractAsyncContextManager[Served]:
    """A policy of the bundled tokenizer that calls a tool, then answers."""
    renderer = ChatRenderer(tokenizer_folder(BUNDLED, tmp_path / "tokenizer"))
    long = SamplingParams(max_tokens=256)
    return served(renderer, [call, ANSWER], sampling=long, max_turns=6, settings=dict(settings))


async def printed_by(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command prints, in a folder that is its home as well."""
    variables = {**os.environ, "HOME": str(folder), **environment}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed.decode()
    return printed.decode()


def assert_one_branch(talk: Served) -> None:
    (result,) = [message["content"] for message in talk.rollout.messages if message["role"] == "tool"]
    assert "7" in result
    assert len(talk.rollout.branches) == 1
    talk.assert_recorded_as_sampled()


async def test_claude_code_completes_a_tool_turn(tmp_path: Path) -> None:
    command = [program("claude"), "-p", QUESTION, "--model", "policy", "--allowedTools", "Bash"]
    async with policy(tmp_path, BASH, system_messages="first") as talk:
        printed = await printed_by(
            command,
            tmp_path,
            ANTHROPIC_BASE_URL=talk.endpoint.root_url,
            ANTHROPIC_API_KEY=talk.endpoint.key,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert printed.strip() == ANSWER
    assert_one_branch(talk)


async def test_codex_completes_a_tool_turn(tmp_path: Path) -> None:
    codex = program("codex")
    async with policy(tmp_path, EXECUTE) as talk:
        (tmp_path / ".codex").mkdir()
        (tmp_path / ".codex" / "config.toml").write_text(codex_settings(talk.endpoint))
        command = [codex, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION]
        printed = await printed_by(command, tmp_path, POLICY_KEY=talk.endpoint.key)
    assert printed.strip().endswith(ANSWER)
    assert_one_branch(talk)


def codex_settings(endpoint: Endpoint) -> str:
    """As `docs/agents.md` shows them."""
    return f"""
model = "policy"
model_provider = "tailrace"
web_search = "disabled"

[features]
multi_agent = false

[model_providers.tailrace]
name = "Tailrace"
base_url = "{endpoint.openai_url}"
env_key = "POLICY_KEY"
wire_api = "responses"
"""
