"""Rollouts of adapted environments through the real rollouter, with scripted replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.environments import EnvironmentSettings, EnvironmentSpec, Json, load_environment
from tailrace.records import GroupId, Rollout, RolloutId
from tailrace.rollouts import ChatRenderer, Endpoints, LoadedEnvironment, Rollouter, RolloutSettings
from tests.support.recorded_generate import RecordedGenerate, require_as_sampled
from tests.support.scripted_generate import Sampled, ScriptedGenerate


def call(name: str, **arguments: Json) -> str:
    """A tool call as the models of the tests write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Played:
    """Rollouts that were played one after another, each with all the replies."""

    spec: EnvironmentSpec
    rollouts: list[Rollout]
    prompts: list[list[int]]

    @property
    def rollout(self) -> Rollout:
        (one,) = self.rollouts
        return one


async def play(
    renderer: ChatRenderer,
    environment: EnvironmentSettings,
    replies: Sequence[str | Sampled | Exception],
    *,
    index: int = 0,
    times: int = 1,
    settings: RolloutSettings | None = None,
    endpoints: Endpoints | None = None,
) -> Played:
    """Every rollout's branches are what was sampled, or this fails."""
    settings = settings or RolloutSettings(workers=1)
    spec = load_environment(environment)
    rollouts, prompts = [], []
    scripted = ScriptedGenerate(renderer.tokenizer, replies)
    generate = RecordedGenerate(scripted)
    environments = {spec.name: LoadedEnvironment.of(spec, settings, environment)}
    async with Rollouter(
        settings, environments, renderer=renderer, generate=generate, endpoints=endpoints
    ) as rollouter:
        await rollouter.start()
        for number in range(times):
            scripted.calls.clear()
            task = spec.train_task(index)
            rollout = await rollouter.run(task, rollout_id=RolloutId(f"r{number}"), group_id=GroupId("g"))
            rollouts.append(rollout)
    prompts = [prompt for prompt, _ in generate.sampled]
    require_as_sampled(rollouts, generate)
    return Played(spec, rollouts, prompts)
