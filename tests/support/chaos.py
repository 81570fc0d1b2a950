"""A run under fire: the quickstart with two generators and two agent workers, one of which is killed now and then."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tailrace.reporting.summary import RunSummary, read_summary
from tests.run.runs import IMPORTS, Command, records

EVERY_S = 5.0
UNDER_FIRE = (
    *("--generator.replicas", "2", "--rollouts.agent_workers", "2", "--observability.live", "off"),
    *("--trainer.checkpoint_every_steps", "4", "--shutdown.close_event_log_s", "30"),
    *("--restarts.per_role", "1000", "--restarts.window_s", "20", "--restarts.backoff_s", "0.1"),
)
"""Nobody is given up, and a trainer has little to do again."""
HELD_OUT = ("--environment.args.eval_seed", "20261122")
_LIMIT_S = 1800.0
_COMMAND = Path(sys.executable).with_name("tailrace")
_ENVIRONMENT = {**os.environ, **IMPORTS}


@dataclass(frozen=True)
class Chaos:
    """What came of it."""

    kills: Counter[str]
    """By role."""
    status: int
    summary: RunSummary
    wall_s: float
    leaks: list[str]
    printed: str


def run_under_fire(parent: Path, *, seed: int, wall_s: float, overrides: Sequence[str] = ()) -> Chaos:
    """From its first step on, one process other than the orchestrator, drawn by the seed, is killed every 5 s."""
    arguments = ["train", "quickstart", "--name", "chaos", "--seed", str(seed), *UNDER_FIRE, *overrides]
    log, began_s = parent / "chaos.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [_COMMAND, *arguments], cwd=parent, env=_ENVIRONMENT, stdout=output, stderr=output, text=True
        )
    run = Command(process, parent / "runs" / "chaos")
    try:
        while process.poll() is None and not records(run.folder / "metrics.jsonl"):
            time.sleep(0.1)
        kills = _fire(run, random.Random(seed), time.monotonic() + wall_s)
        status = process.wait(_LIMIT_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    leaks = [str(path) for path in run.leftovers()]
    summary = read_summary(run.folder)
    assert summary is not None, log.read_text()
    return Chaos(kills, status, summary, time.monotonic() - began_s, leaks, log.read_text())


def held_out_reward(parent: Path, model: str) -> float:
    """Mean over the quickstart's held-out tasks, sampled at temperature 1, by the command."""
    command = [_COMMAND, "eval", "quickstart", "--json", *HELD_OUT, "--model.name", model]
    done = subprocess.run(command, cwd=parent, env=_ENVIRONMENT, capture_output=True, text=True, check=True)
    [figures] = json.loads(done.stdout.splitlines()[-1]).values()
    return float(figures["reward_mean"])


def _fire(run: Command, chance: random.Random, ends_s: float) -> Counter[str]:
    """Until then, or the run's end."""
    kills: Counter[str] = Counter()
    while time.monotonic() < ends_s and run.process.poll() is None:
        if targets := _targets(run):
            name, victim = chance.choice(targets)
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                kills[name] += 1
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(EVERY_S)
    return kills


def _targets(run: Command) -> list[tuple[str, psutil.Process]]:
    """Roles and agent workers that run now, in an order of their names."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(run.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (name := _name(child, run.folder / "logs")) is not None:
                    found.append((name, child))
    return sorted(found, key=lambda one: (one[0], one[1].pid))


def _name(child: psutil.Process, logs: Path) -> str | None:
    if "tailrace.rollouts.agent_workers.process" in child.cmdline():
        return "agent worker"
    own = [Path(file.path) for file in child.open_files() if Path(file.path).parent == logs]
    return own[0].stem if own else None
