"""The environments that ship with Tailrace, played through the real rollouter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.records import GroupId, Rollout, RolloutId
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutSettings
from tests.support.scripted_generate import ScriptedGenerate


async def play(
    renderer: ChatRenderer, environment: EnvironmentSettings, replies: Sequence[str], index: int = 0
) -> Rollout:
    settings = RolloutSettings()
    spec = load_environment(environment)
    generate = ScriptedGenerate(renderer.tokenizer, replies)
    environments = {spec.name: LoadedEnvironment.of(spec, settings, environment)}
    async with Rollouter(settings, environments, renderer=renderer, generate=generate) as rollouter:
        return await rollouter.run(spec.train_task(index), rollout_id=RolloutId("r"), group_id=GroupId("g"))


async def test_alphabet_sort_is_one_branch_and_the_same_in_a_worker(renderer: ChatRenderer) -> None:
    played = [
        await play(renderer, EnvironmentSettings(name="alphabet-sort", trusted=trusted), ["Ada\nBob"])
        for trusted in (True, False)
    ]
    here, there = played
    assert here.turns >= 2
    assert len(here.branches) == 1
    assert here.reward == there.reward
    assert here.branches[0].token_ids.tolist() == there.branches[0].token_ids.tolist()


@pytest.mark.parametrize("model", ["hermes", "qwen3"])
async def test_the_calculators_output_is_context_without_loss(
    renderer_of: Callable[[str], ChatRenderer], model: str
) -> None:
    renderer = renderer_of(model)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1234 * 100"}}\n</tool_call>'
    rollout = await play(renderer, EnvironmentSettings(name="calculator"), [call, "123400"])
    (branch,) = rollout.branches
    assert len(branch.completion_spans) == 2
    assert rollout.metrics["tool_calls"] == 1
    sampled = renderer.tokenizer.decode(branch.token_ids[branch.loss_mask].tolist())
    context = renderer.tokenizer.decode(branch.token_ids[~branch.loss_mask].tolist())
    assert sampled.count("123400") == 1
    assert "<tool_response>\n123400\n</tool_response>" in context


@pytest.mark.parametrize("name", ["reverse-text", "arithmetic"])
async def test_single_turn_environments_are_scored(renderer: ChatRenderer, name: str) -> None:
    rollout = await play(renderer, EnvironmentSettings(name=name), ["no idea"])
    assert rollout.turns == 1
    assert rollout.reward is not None
    assert rollout.reward.value < 0.5
