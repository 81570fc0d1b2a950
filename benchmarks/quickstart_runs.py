"""Runs of the quickstart recipe by the command, for figures of what they learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import TAILRACE, environment


def train_quickstart(
    folder: Path, name: str, *, seed: int, steps: int, overrides: tuple[str, ...], may_fail: bool = False
) -> Path:
    """A run to its end; its folder under `folder`. Where it may not fail, this program ends with what it printed."""
    arguments = ["train", "quickstart", "--name", name, "--seed", str(seed), "--max_steps", str(steps), *overrides]
    command = [str(TAILRACE), *arguments, "--observability.live", "off"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        sys.exit(f"tailrace train failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return folder / "runs" / name


def summary_of(run: Path) -> dict[str, Any]:
    """As the run wrote it."""
    return dict(json.loads((run / "summary.json").read_text()))


def metric(run: Path, name: str) -> list[float]:
    """Every value of a metric, in the order of steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(line[name]) for line in lines if name in line]
