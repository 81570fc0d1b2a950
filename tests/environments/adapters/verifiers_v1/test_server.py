"""The server is a child process: joined over HTTP, watched, told of what is cancelled, and gone with its run.

A stand-in speaks verifiers' protocol here; `test_verifiers_itself.py` has verifiers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.environments import EnvironmentSettings, Json, load_environment
from tailrace.environments.adapters.verifiers_v1.environment import client_of
from tailrace.environments.adapters.verifiers_v1.server import VerifiersServer
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.gateway.gateway import Gateway
from tailrace.rollouts import ChatRenderer
from tests.environments.adapters.playing import play
from tests.support import env_server
from tests.support.descendants import descendants
from tests.support.served_policies import Served, served

PROMPT = [5, 6, 7]


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """In place of one that has verifiers."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{env_server.__file__}" "$@"\n')
    script.chmod(0o755)
    return script


def serving(interpreter: Path, **env: Json) -> VerifiersServer:
    return VerifiersServer(python=interpreter, env={"taskset": {"id": "adding", "tasks": []}, **env})


def row(do: str = "ask") -> dict[str, Json]:
    return {"do": do, "prompt_ids": PROMPT}


def client(talk: Served) -> dict[str, Json]:
    return client_of(talk.endpoint)


def processes() -> list[list[str]]:
    """Stand-ins that run."""
    return descendants("env_server.py")


async def test_rollouts_are_played_by_the_server_and_recorded_as_sampled(
    renderer: ChatRenderer, interpreter: Path
) -> None:
    tasks = [{"idx": 0, **row()}, {"idx": 1, **row()}]
    environment = EnvironmentSettings(
        name="verifiers-v1", args={"id": "hub/adding@1.0", "python": str(interpreter), "tasks": tasks}
    )
    played = await play(renderer, environment, ["Ada"], index=1, times=2, endpoints=Gateway())
    assert (played.spec.name, len(played.spec.train_tasks)) == ("adding", 2)
    for rollout in played.rollouts:
        assert rollout.reward is not None
        assert (rollout.reward.value, rollout.reward.components) == (1.0, {"turns": 1.0, "near": 0.5, "brief": 1.0})
        (branch,) = rollout.branches
        assert branch.token_ids[:3].tolist() == PROMPT
        assert rollout.reward.columns["answer"] == branch.token_ids[3:].tolist()
    assert [rollout.reward.columns["session_id"] for rollout in played.rollouts if rollout.reward] == ["t1", "t2"]
    assert not processes()


async def test_one_that_ends_costs_the_rollouts_that_it_played_and_is_started_again(
    renderer: ChatRenderer, interpreter: Path
) -> None:
    server = serving(interpreter)
    async with served(renderer, ["Ada"]) as talk:
        outcomes = await asyncio.gather(
            server.play(row("wait"), client(talk)), server.play(row("die"), client(talk)), return_exceptions=True
        )
        trace = await server.play(row(), client(talk))
        talk.assert_recorded_as_sampled()
        await server.close()
    assert trace.ok
    for outcome in outcomes:
        assert isinstance(outcome, EnvironmentFailed)
        assert "the environment adding of verifiers ended with status 3; it wrote: no memory is left" in str(outcome)
    assert not processes()


async def test_a_rollout_that_is_cancelled_is_cancelled_there(
    renderer: ChatRenderer, interpreter: Path, deltas: asyncio.Queue[bytes]
) -> None:
    server = serving(interpreter)
    async with served(renderer, ["Ada"]) as talk:
        waiting = asyncio.create_task(server.play(row("wait"), client(talk)))
        async with asyncio.timeout(60):
            await deltas.get()  # it has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        trace = await server.play(row(), client(talk))
        await server.close()
    assert trace.info["cancelled"] == 1


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("fail", "verifiers: TaskError: scoring: no judge"),
        ("lose", "a part of what trace t1 said never came"),
        ("refuse", "verifiers: ValueError: no such task"),
    ],
)
async def test_what_fails_there_costs_the_rollout(
    renderer: ChatRenderer, interpreter: Path, do: str, says: str
) -> None:
    server = serving(interpreter)
    async with served(renderer, ["Ada"]) as talk:
        with pytest.raises(EnvironmentFailed, match=says):
            await server.play(row(do), client(talk))
        await server.close()


async def test_its_end_leaves_nothing(renderer: ChatRenderer, interpreter: Path) -> None:
    server = serving(interpreter)
    async with served(renderer, ["Ada"]) as talk:
        await server.play(row(), client(talk))
        (running,) = processes()
        folder = Path(running[-1].removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        await server.close()
        await server.close()
    assert not processes()
    assert not folder.exists()


def test_it_ends_with_an_event_loop_that_nobody_closed_it_on(renderer: ChatRenderer, interpreter: Path) -> None:
    server = serving(interpreter)

    async def leave() -> None:
        async with served(renderer, ["Ada"]) as talk:
            await server.play(row(), client(talk))
        assert len(processes()) == 1

    asyncio.run(leave())
    assert not processes()


def script(folder: Path, text: str) -> Path:
    path = folder / "interpreter"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "timeout_s", "says"),
    [
        ("echo no module named verifiers; exit 4", 60.0, "ended with status 4; it wrote: no module named verifiers"),
        ("exec sleep 60", 0.5, "did not answer within 0.5 s of its start"),
    ],
)
async def test_one_that_does_not_come_up_costs_the_rollout(
    tmp_path: Path, text: str, timeout_s: float, says: str
) -> None:
    server = VerifiersServer(python=script(tmp_path, text), env={"taskset": {"id": "x"}}, start_timeout_s=timeout_s)
    with pytest.raises(EnvironmentFailed, match=says):
        await server.play(row(), {})
    await server.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: serving(folder / "python", version="0.3.1").tasks, "has verifiers 0.3.1; this needs 0.4"),
        (lambda folder: serving(folder / "python").tasks, "the environment adding of verifiers has no task"),
        (lambda folder: serving(folder / "absent").tasks, "absent cannot be started: No such file"),
        (
            lambda folder: serving(script(folder, "echo out of reach; exit 1")).tasks,
            "was to tell its tasks ended with status 1; it wrote: out of reach",
        ),
        (
            lambda folder: serving(script(folder, 'echo \'{"error": "it has 2 agents"}\' > "$4"')).tasks,
            "the environment adding of verifiers: it has 2 agents",
        ),
    ],
)
def test_what_cannot_be_played_is_told_when_its_tasks_are_looked_at(
    interpreter: Path, make: Callable[[Path], object], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        make(interpreter.parent)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"id": "adding"}, "tailrace environments install verifiers==0.4.0"),
        ({"id": "adding", "path": "nowhere"}, "environment.args.path is 'nowhere', and there is no such folder"),
        ({"id": "adding", "concurrency": 0}, "args.concurrency, args.start_timeout_s and args.max_tasks are above 0"),
        ({}, "environment.args.id is missing"),
    ],
)
def test_wrong_arguments_are_told_when_it_is_loaded(
    arguments: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=says):
        load_environment(EnvironmentSettings(name="verifiers-v1", args=arguments))
