"""Whole runs that clients outside play, over real HTTP: the example's client, or nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.config import load_settings
from tailrace.dashboard.chat import reply, running_policy
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port
from tailrace.run.evaluating import evaluate_model
from tailrace.run.training import train
from tests.run.runs import ROLES, ROOT, command, records, require_rise, rollouts, tiny_settings

OUTSIDE = ("--environment.name", "tests.support.program_environments:outside")
STEPS, WINDOW = 10, 3
MARGIN = 0.2
QUIET = ("--placement", "inline", "--observability.live", "off", "--observability.report", "false")


@contextmanager
def client_of(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example's client, which waits for the run to begin and ends with it."""
    process = subprocess.Popen([sys.executable, ROOT / "examples" / "outside_client.py", folder / "gateway.json"])
    try:
        yield process
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


async def test_the_reward_of_rollouts_that_are_played_outside_rises_beyond_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example's client sorts names. The mean reward of the last three steps is above that of the first three.

    It rose by 0.36 when the margin was set; a mean of three steps has a standard error of about 0.05.
    """
    monkeypatch.chdir(ROOT)
    chosen = ("--environment.name", "examples.own_outside:sorting", "--max_steps", str(STEPS), "--name", "outside")
    settings = load_settings("quickstart", [*chosen, *QUIET])
    with client_of(tmp_path / "outside") as client:
        summary = await train(settings, tmp_path)
    assert summary.steps == STEPS, summary
    assert client.returncode == 0
    require_rise(tmp_path / "outside", steps=STEPS, window=WINDOW, margin=MARGIN)
    lines = records(tmp_path / "outside" / "metrics.jsonl")
    assert any(line.get("gateway/claimed") for line in lines)
    assert not (tmp_path / "outside" / "gateway.json").exists()


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    answer.raise_for_status()
    told: dict[str, Any] = {} if answer.status_code == 204 else answer.json()
    return told


def play_own_tasks(gateway: dict[str, str]) -> None:
    """Each task as often as a group has rollouts, until the run is over."""
    with suppress(httpx.HTTPError):  # the run has ended
        for number in itertools.count():
            brought = {"task": {"word": f"mine {number // 2}"}, "wait_s": 60}
            while not (claimed := post(f"{gateway['url']}/rollouts", gateway["key"], brought)):
                pass
            asks = {"model": "m", "messages": [{"role": "user", "content": claimed["task"]["word"]}]}
            with suppress(httpx.HTTPStatusError):  # this rollout was cancelled
                post(f"{claimed['openai_base_url']}/chat/completions", claimed["key"], asks)
                post(f"{claimed['rollout_url']}/reward", claimed["key"], {"reward": number % 3})


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_is_trained_on_tasks_that_a_client_brings(tmp_path: Path, roles: tuple[str, ...]) -> None:
    bringing = ("--environment.name", "tests.support.program_environments:bringing", "--max_steps", "2")
    with command(tmp_path, *roles, *bringing) as run:
        told = run.folder / "gateway.json"
        run.wait_until(told.exists)
        play_own_tasks(json.loads(told.read_text()))
        status, printed = run.wait()
    assert status == 0, printed
    trained = [one for one in rollouts(run.folder) if one["outcome"]["state"] == "trained"]
    asked = Counter(one["messages"][0]["content"] for one in trained)
    assert len(trained) == 8
    assert set(asked.values()) == {2}
    assert all(word.startswith("mine ") for word in asked)


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_tells_its_owner_where_clients_find_it_and_says_that_it_waits_for_them(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    with command(tmp_path, *roles, *OUTSIDE, "--observability.no_progress_s", "1") as run:
        told, log = run.folder / "gateway.json", run.folder / "logs" / "orchestrator.log"
        run.wait_until(lambda: log.exists() and "waits for a client outside to claim one of" in log.read_text())
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        access = json.loads(told.read_text())
        url = access["url"]
        asks = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "logprobs": True}
        (choice,) = post(f"{url}/v1/chat/completions", access["policy_key"], asks)["choices"]  # nobody's rollout
        assert 1 <= len(choice["logprobs"]["content"]) <= 3
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            post(f"{url}/rollouts", access["policy_key"], {})
        assert f"rollouts of outside (POST {url}/rollouts" in log.read_text()
        assert "Clients outside play outside with an agent worker" in log.read_text()
        os.kill(run.pid, signal.SIGTERM)
        status, printed = run.wait()
    assert status == 143, printed
    assert not told.exists()
    assert not any("http" in one["rollout_id"] for one in rollouts(run.folder))


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_with_an_address_of_its_own_answers_whoever_has_the_key_of_its_policy(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    port = free_port()
    with command(tmp_path, *roles, "--gateway.port", str(port), "--max_steps", "100000") as run:
        told = run.folder / "gateway.json"
        run.wait_until(told.exists)
        place = running_policy(run.folder)
        assert place is not None
        assert place.url == f"http://127.0.0.1:{port}"
        said = asyncio.run(reply(place, b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'))
        assert len(said.texts) == len(said.logprobs) >= 1
        os.kill(run.pid, signal.SIGTERM)
        status, printed = run.wait()
    assert status == 143, printed
    assert running_policy(run.folder) is None


async def test_an_evaluation_that_no_client_could_find_is_refused(tmp_path: Path) -> None:
    held_out = ("--environment.name", "examples.own_outside:sorting", "--environment.eval_tasks", "4")
    with pytest.raises(SettingsError, match="which find a run by its folder: `tailrace eval` has none"):
        await evaluate_model(tiny_settings(*held_out, parent=tmp_path))


async def test_the_example_program_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    few = ("--rollouts.group_size", "4", "--scheduling.batch_size", "8", "--rollouts.max_turns", "4")
    chosen = (*few, "--environment.name", "examples.own_program:seats", "--max_steps", "2", "--name", "program")
    settings = load_settings("quickstart", [*chosen, *QUIET, "--rollouts.max_tokens", "48"])
    summary = await train(settings, tmp_path)
    assert summary.steps == 2, summary
    trained = [one for one in rollouts(tmp_path / "program") if one["outcome"]["state"] == "trained"]
    assert len(trained) >= 16
    assert all(one["columns"]["exit_status"] == 0 for one in trained)
    assert all("right" in one["reward_components"] for one in trained), trained[0].keys()
