"""Whole runs that clients outside play, over real HTTP: the example's client, or nobody."""

from __future__ import annotations

import json
import os
import signal
import stat
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.config import load_settings
from tailrace.errors import SettingsError
from tailrace.run.evaluating import evaluate_model
from tailrace.run.training import train
from tests.run.runs import ROOT, command, records, rollouts, tiny_settings

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
    rewards: list[list[float]] = [[] for _ in range(STEPS + 1)]
    for record in rollouts(tmp_path / "outside"):
        if record["reward"] is not None:
            rewards[record["step"]].append(record["reward"])
    means = [statistics.fmean(of_step) for of_step in rewards[1:]]
    rise = statistics.fmean(means[-WINDOW:]) - statistics.fmean(means[:WINDOW])
    assert rise > MARGIN, f"rose by {rise:.3f}: {means}"
    lines = records(tmp_path / "outside" / "metrics.jsonl")
    assert any(line.get("gateway/claimed") for line in lines)
    assert not (tmp_path / "outside" / "gateway.json").exists()


def test_a_run_tells_its_owner_where_clients_find_it_and_says_that_it_waits_for_them(tmp_path: Path) -> None:
    with command(tmp_path, *OUTSIDE, "--observability.no_progress_s", "1") as run:
        told, log = run.folder / "gateway.json", run.folder / "logs" / "orchestrator.log"
        run.wait_until(lambda: log.exists() and "waits for a client outside to claim one of" in log.read_text())
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        url = json.loads(told.read_text())["url"]
        assert f"rollouts of outside (POST {url}/rollouts" in log.read_text()
        os.kill(run.pid, signal.SIGTERM)
        status, printed = run.wait()
    assert status == 143, printed
    assert not told.exists()


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
