"""Whole runs that clients outside play, over real HTTP: the example's client, or nobody."""

from __future__ import annotations

import json
import os
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
from tests.run.runs import ROOT, command, records, rollouts, run_inline, tiny_settings

OUTSIDE = ("--environment.name", "tests.support.program_environments:outside")
STEPS, WINDOW = 12, 4
MARGIN = 0.15
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
    """The example's client sorts names; as `test_learning`, whose margin tells learning from chance."""
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


def test_the_run_tells_its_owner_alone_where_clients_find_it(tmp_path: Path) -> None:
    with command(tmp_path, *OUTSIDE) as run:
        told = run.folder / "gateway.json"
        run.wait_until(told.exists)
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        assert json.loads(told.read_text())["url"].startswith("http://127.0.0.1:")
        os.kill(run.pid, 15)
        status, printed = run.wait()
    assert status == 143, printed
    assert not told.exists()


async def test_a_run_that_nobody_plays_ends_and_says_whom_it_waited_for(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *OUTSIDE, "--observability.watchdog_s", "3")
    assert (summary.status, summary.exit_code) == ("failed", 1)
    assert "waits for a client outside to claim one of" in summary.reason
    assert "rollouts of outside (POST http://127.0.0.1:" in summary.reason


async def test_an_evaluation_that_no_client_could_find_is_refused(tmp_path: Path) -> None:
    held_out = ("--environment.name", "examples.own_outside:sorting", "--environment.eval_tasks", "4")
    with pytest.raises(SettingsError, match="which find a run by its folder: `tailrace eval` has none"):
        await evaluate_model(tiny_settings(*held_out, parent=tmp_path))


async def test_the_example_program_calls_its_tool_and_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
