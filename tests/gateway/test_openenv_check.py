"""OpenEnv's own check of a model's endpoint, as it is: it asks, and says what the answers can be used for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

import pytest

from tailrace.records import SamplingParams
from tailrace.rollouts import ChatRenderer
from tests.support.installed_openenv import installed_openenv
from tests.support.served_policies import served

CHECK = """
import dataclasses, json, sys
from openenv.core.harness.capture.validate_llm import validate_llm

print(json.dumps(dataclasses.asdict(validate_llm(sys.argv[1], "policy", api_key=sys.argv[2]))))
"""
LISTS = '<tool_call>{"name": "bash", "arguments": {"command": "ls /tmp"}}</tool_call>'


@pytest.mark.long
@pytest.mark.parametrize(("whose", "asks_again"), [("client", 1), ("run", 0)])
async def test_openenv_grades_the_endpoint_token_exact(
    renderer_of: Callable[[str], ChatRenderer], whose: str, asks_again: int
) -> None:
    """It asks for a temperature of 0, which a rollout refuses by name: then it asks without, as of any provider."""
    python = installed_openenv()
    long = SamplingParams(max_tokens=64)
    async with served(renderer_of("hermes"), ["ok", LISTS], sampling=long, settings={"sampling": whose}) as talk:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", CHECK, talk.endpoint.openai_url, talk.endpoint.key),
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 120)
    report = json.loads(printed)
    (branch, *_) = talk.rollout.branches
    start, end = branch.completion_spans[0]
    assert (report["ok"], report["capture_level"], report["tool_support"]) == (True, "tokens", "ok"), report
    assert (report["n_prompt_ids"], report["n_completion_ids"]) == (start, end - start)
    assert [fix for fix in report["param_fixes"] if "temperature" in fix] == ["dropped temperature"] * asks_again
    assert not [one for one in report["findings"] if one.startswith("[FATAL]")], report
    talk.assert_recorded_as_sampled()
