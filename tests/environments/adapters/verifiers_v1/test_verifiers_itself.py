"""verifiers 0.4 itself: packages as its `vf-init` writes them, under its `null` harness, played and trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tailrace
from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.environments.adapters.verifiers_v1.environment import client_of
from tailrace.environments.adapters.verifiers_v1.server import VerifiersServer
from tailrace.errors import SettingsError
from tailrace.gateway.gateway import Gateway
from tailrace.records import RunStatus
from tailrace.rollouts import ChatRenderer
from tests.environments.adapters.playing import call, play
from tests.examples.test_adapted_runs import CHANGES
from tests.support.descendants import descendants
from tests.support.served_policies import served
from tests.support.verifiers_scaffolds import VERIFIERS, echoing, greeting, scaffold

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not VERIFIERS.is_installed, reason="make environments installs it"),
]


def settings(package: Path, **args: Any) -> EnvironmentSettings:
    return EnvironmentSettings(name="verifiers-v1", args={"id": package.name, "path": str(package), **args})


def serving(package: Path, **env: Any) -> VerifiersServer:
    return VerifiersServer(python=VERIFIERS.python, env={"taskset": {"id": package.name}, **env}, path=package)


def children() -> list[list[str]]:
    """Processes of verifiers, and those that they started."""
    return descendants(str(VERIFIERS.folder))


async def test_a_generated_package_is_played_as_it_is(renderer: ChatRenderer, tmp_path: Path) -> None:
    package = greeting(tmp_path)
    played = await play(
        renderer, settings(package, num_tasks=3), ["Ada", "Adas"], index=2, times=2, endpoints=Gateway()
    )
    assert len(played.spec.train_tasks) == 3
    assert played.spec.train_tasks[2]["prompt"] == "Say 2."
    asked = renderer.render([{"role": "user", "content": "Say 2."}]).tolist()
    for rollout in played.rollouts:
        assert rollout.reward is not None
        assert rollout.reward.value == rollout.reward.components["reward"] == 1.0
        assert rollout.reward.columns["stop_condition"] == "agent_completed"
        (branch,) = rollout.branches
        assert branch.token_ids[: len(asked)].tolist() == asked
    assert not children()


def held(deltas: asyncio.Queue[bytes]) -> dict[str, list[Any]]:
    """What verifiers' own trace has, over all nodes."""
    columns: dict[str, list[Any]] = {"token_ids": [], "mask": [], "logprobs": []}
    while not deltas.empty():
        for node in msgspec.msgpack.decode(deltas.get_nowait()).get("nodes", []):
            for name, column in columns.items():
                column.extend(node[name] or [])
    return columns


async def test_tools_take_turns_and_its_trace_has_the_tokens_that_were_sampled(
    renderer: ChatRenderer, tmp_path: Path, deltas: asyncio.Queue[bytes]
) -> None:
    replies = [call("echoing_echo", text="hush"), "hush"]
    server = serving(echoing(tmp_path))
    async with served(renderer, replies, max_model_tokens=4000) as talk:
        try:
            trace = await server.play(server.tasks[0], client_of(talk.endpoint))
        finally:
            await server.close()
        talk.assert_recorded_as_sampled()
    (branch,), tokens = talk.rollout.branches, held(deltas)
    assert trace.rewards["reward"].score == 1.0
    assert tokens["token_ids"] == branch.token_ids.tolist()
    assert tokens["mask"] == branch.loss_mask.tolist()
    assert tokens["logprobs"] == pytest.approx(branch.logprobs[branch.loss_mask].tolist())
    assert "hush\n</tool_response>" in talk.prompt(1)
    assert not children()


async def test_an_episode_that_uses_up_its_turns_is_scored_as_it_is(renderer: ChatRenderer, tmp_path: Path) -> None:
    environment = settings(echoing(tmp_path)).model_copy(update={"max_turns": 2})
    played = await play(renderer, environment, [call("echoing_echo", text="tush")], endpoints=Gateway())
    assert played.rollout.reward is not None
    assert (played.rollout.turns, played.rollout.reward.value) == (2, 0.0)


async def test_a_rollout_that_is_cancelled_leaves_no_process(renderer: ChatRenderer, tmp_path: Path) -> None:
    server = serving(greeting(tmp_path))
    async with served(renderer, ["Ada"], stepwise=True) as talk:
        playing = asyncio.create_task(server.play(server.tasks[0], client_of(talk.endpoint)))
        await talk.generate.until(begun=1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await talk.generate.until(cancelled=1)
    await server.close()
    assert not children()


async def test_it_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = greeting(tmp_path)
    monkeypatch.chdir(tmp_path)
    environment = settings(package, num_tasks=16).model_dump(exclude_defaults=True)
    changes = {**CHANGES, "environment": environment, "rollouts": {**CHANGES["rollouts"], "timeout_s": 200}}  # type: ignore[dict-item]
    result = await tailrace.train_async("quickstart", changes)
    assert result.status is RunStatus.FINISHED, result.summary.reason
    assert [line["step"] for line in result.metrics()] == [1, 2]
    assert not children()


IMAGE = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]'


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"id": "user_sim"}, "it has 2 agents .*what plays against another model"),
        ({"agent": {"model": "other"}}, "env.agent has a model or a client of its own"),
        ({"agent": {"runtime": {"type": "prime"}}}, "env.agent.runtime is prime, from where the policy could be"),
        ({"agent": {"retries": {"max_retries": 2}}}, "env.agent.retries: what an attempt that failed had sampled"),
        ({"agent": {"harness": {"id": "codex"}}}, "the harness codex speaks OpenAI's Responses"),
        ({"agent": {"harness": {"id": "browser_use"}}}, "needs a container runtime"),
        ({"agent": {"harness": {"id": "nil"}}}, "harness 'nil' not found"),
        ({"taskset": {"id": "no-such"}}, "taskset 'no-such' not found"),
    ],
)
def test_what_it_cannot_do_is_told_when_it_is_loaded(tmp_path: Path, env: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        assert serving(greeting(tmp_path), **env).tasks


@pytest.mark.parametrize(
    ("prompt", "says"),
    [(IMAGE, "the prompt of task 0 holds content of type 'image_url'"), ("None", "task 0 has no prompt")],
)
def test_prompts_that_the_policy_cannot_read_are_told(tmp_path: Path, prompt: str, says: str) -> None:
    tasks = f"[SeeingTask(SeeingData(prompt={prompt}), self.config.task)]"
    package = scaffold(tmp_path, "seeing", load=tasks, reward="1.0")
    with pytest.raises(SettingsError, match=says):
        load_environment(settings(package))
