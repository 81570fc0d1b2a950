"""What is made of runs of both sides: `benchmarks/peers.py`."""

from __future__ import annotations

import json
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import peers
from benchmarks.peers import TRL_ON_POLICY, Job

JOB = Job(
    Path("model"), Path("tasks"), "length", "float32", 8, 8, 64, max_tokens_per_completion=256, learning_rate=1e-7
)


class Programs:
    """In the place of both sides' commands."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}

    def run(self, command: list[str], *, cwd: Path, env: dict[str, str], **_: object) -> Any:
        self.environment = env
        if command[1] == "train":
            run = cwd / "runs" / Path(command[2]).stem
            for step in (3, 8):
                (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            summary = {"tokens_trained": 1000, "tokens_generated": 1200, "cpu_s": 4.0}
            (run / "summary.json").write_text(
                json.dumps({**summary, "ledger": {"by_state": {"trained": 5, "lost": 1}}})
            )
            (run / "metrics.jsonl").write_text('{"wall_s": 1.0}\n{"wall_s": 2.5}\n')
        else:
            figures = {"tokens": 600, "generated_tokens": 800, "cpu_s": 3.0, "wall_s": 4.0, "mean_tokens": 150.0}
            (Path(command[2]).parent / "figures.json").write_text(json.dumps(figures))
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs()
    monkeypatch.setattr(subprocess, "run", programs.run)
    return programs


def test_tailraces_rate_is_of_trained_tokens_over_all_processes(tmp_path: Path, programs: Programs) -> None:
    found = peers.run_tailrace(replace(JOB, seed=2), tmp_path, "ours")
    assert (found.tokens_per_cpu_s, found.tokens_per_s, found.mean_tokens) == (250.0, 400.0, 200.0)
    assert found.model.name == "step_000008"
    settings = tomllib.loads((tmp_path / "ours.toml").read_text())
    assert (settings["seed"], settings["generator"]["slots"], settings["max_steps"]) == (2, 256, 8)
    assert {programs.environment[name] for name in peers.THREAD_VARIABLES} == {"1"}


def test_trls_rate_is_of_the_same_job_with_the_threads_of_its_tuning(tmp_path: Path, programs: Programs) -> None:
    found = peers.run_peer(replace(JOB, seed=2), tmp_path, "theirs", replace(TRL_ON_POLICY, threads=2))
    assert (found.tokens_per_cpu_s, found.tokens_per_s, found.mean_tokens) == (200.0, 150.0, 150.0)
    job = json.loads((tmp_path / "trl-theirs" / "job.json").read_text())
    assert (job["seed"], job["steps"], job["batch_size"], job["tuning"]["threads"]) == (2, 8, 64, 2)
    assert {programs.environment[name] for name in peers.THREAD_VARIABLES} == {"2"}
    assert programs.environment["MALLOC_ARENA_MAX"] == "1"
