"""Whole runs of the bundled model, as small as they can be: in this process, or as the command."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from tailrace.config import RUNS, RunSettings, load_settings
from tailrace.reporting.summary import RunSummary
from tailrace.run.callbacks import Callbacks
from tailrace.run.training import train
from tailrace.transport.channels import runtime_folder
from tailrace.transport.owned_folders import shared_memory_folder

ROOT = Path(__file__).parents[2]
TINY = (
    *("--rollouts.group_size", "2", "--rollouts.max_tokens", "6", "--rollouts.max_turns", "1"),
    *("--scheduling.batch_size", "4", "--scheduling.filter_zero_spread", "false"),
    *("--scheduling.row_tokens", "512", "--generator.max_cache_tokens", "512", "--generator.slots", "8"),
    *("--observability.report", "false"),
)
REPORT = ("--observability.report", "true")
"""For tests that look at the report: to write it takes as long as the rest of a run in one process."""
WITHOUT_MODEL = ("--placement", "tests.support.light_roles:LightLauncher", "--scheduling.max_staleness", "20")
"""Roles that import no torch, and so start in a second. Their processes, signals, sockets and files are real."""
ROLES = [pytest.param((), id="real", marks=pytest.mark.long), pytest.param(WITHOUT_MODEL, id="without a model")]
"""For a test that is about no model: each time without one, and with one in `make test-all`."""
RESUMED = ("--resume", "--allow-changed-settings")
"""Goes on with whatever is given now."""
PATIENCE_S = 240.0
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
"""So that a command runs this very tree, and finds the tests' environments."""


def environment(name: str) -> tuple[str, ...]:
    return ("--environment.name", f"tests.support.run_environments:{name}")


def tiny_settings(*overrides: str, name: str = "run", parent: Path = RUNS) -> RunSettings:
    return load_settings("quickstart", [*TINY, *environment("words"), "--name", name, *overrides], parent)


async def run_inline(
    parent: Path, *overrides: str, name: str = "run", callbacks: Callbacks | None = None
) -> RunSummary:
    """A run in this very process."""
    inline = ("--placement", "inline", "--observability.live", "off")
    return await train(tiny_settings(*inline, *overrides, name=name, parent=parent), parent, callbacks=callbacks)


def require_rise(folder: Path, *, steps: int, window: int, margin: float) -> None:
    """The mean reward of the last `window` steps of a run is above that of its first ones by more than `margin`."""
    rewards: list[list[float]] = [[] for _ in range(steps + 1)]
    for record in rollouts(folder):
        if record["reward"] is not None:
            rewards[record["step"]].append(record["reward"])
    means = [statistics.fmean(of_step) for of_step in rewards[1:]]
    rise = statistics.fmean(means[-window:]) - statistics.fmean(means[:window])
    assert rise > margin, f"rose by {rise:.3f}: {means}"


def role_of(owner: int, folder: Path, name: str) -> psutil.Process:
    """The process of a role of the run of `owner` in `folder`, known by the log that it writes."""
    log = str(folder / "logs" / f"{name}.log")
    for child in psutil.Process(owner).children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if any(file.path == log for file in child.open_files()):
                return child
    raise AssertionError(f"no {name} runs")


@dataclass
class Command:
    """`tailrace train` as a process of its own, with run folders under its working folder."""

    process: subprocess.Popen[str]
    folder: Path
    """The run's."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> tuple[int, str]:
        """Exit status and all that it printed."""
        printed, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, printed

    def wait_for_steps(self, count: int) -> None:
        """Until so many lines of metrics are written."""
        self.wait_until(lambda: len(records(self.folder / "metrics.jsonl")) >= count)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, self.wait()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def role(self, name: str) -> psutil.Process:
        """The process of a role."""
        return role_of(self.pid, self.folder, name)

    def leftovers(self) -> list[Path]:
        """Shared memory and sockets that carry this process's number."""
        return [
            path
            for parent in (shared_memory_folder(), runtime_folder())
            for path in parent.glob(f"tailrace-*{self.pid}-*")
        ]


@contextmanager
def command(
    parent: Path,
    *overrides: str,
    name: str = "run",
    variables: Mapping[str, str] = MappingProxyType({}),
    within: Sequence[str] = (),
    is_tiny: bool = True,
) -> Iterator[Command]:
    """Start `tailrace train` with the tiny settings, or the quickstart's; whatever it started is gone afterwards.

    `variables` are of its environment, `within` is a command that becomes the one that it is given.
    """
    tiny = (*TINY, *environment("words")) if is_tiny else ()
    arguments = ["train", "quickstart", *tiny, "--name", name, *overrides]
    process = subprocess.Popen(
        [*within, Path(sys.executable).with_name("tailrace"), *arguments],
        cwd=parent,
        env={**os.environ, **IMPORTS, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Command(process, parent.resolve() / "runs" / name)
    try:
        yield run
    finally:
        for left in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if left.pid == process.pid or process.pid in [parent.pid for parent in left.parents()]:
                    left.kill()
        process.wait()
        for folder in run.leftovers():  # of a test that kills the command, which then removes nothing itself
            shutil.rmtree(folder, ignore_errors=True)


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Every rollout of a run's folder, in the order of its steps."""
    return [record for path in sorted((folder / "rollouts").glob("step_*.jsonl")) for record in records(path)]


def trained_tasks(folder: Path) -> list[str]:
    """The task of every trained rollout."""
    return [record["task_id"] for record in rollouts(folder) if record["outcome"]["state"] == "trained"]


def length_ratio(written: list[dict[str, Any]], begin_s: float) -> float:
    """Of these rollouts, those that finished from `begin_s` on: mean length of trained ones over that of all."""
    counted = [one for one in written if _finished_s(one) >= begin_s and one["outcome"]["state"] != "failed"]
    trained = [record for record in counted if record["outcome"]["state"] == "trained"]
    lengths, all_lengths = ([record["completion_tokens"] for record in some] for some in (trained, counted))
    return statistics.fmean(lengths) / statistics.fmean(all_lengths)


def warm_from(written: list[dict[str, Any]], ratio: float | None) -> list[float]:
    """When warm-up may have ended, for a run to come to this length ratio: with its first step, at a time unknown.

    That was after the rollouts finished that the step was trained on.
    """
    first = max(_finished_s(one) for one in written if one["outcome"]["state"] == "trained" and one["step"] == 1)
    begins = [_finished_s(record) for record in written if _finished_s(record) > first]
    return [begin_s for begin_s in begins if length_ratio(written, begin_s) == pytest.approx(ratio, rel=1e-9)]


def _finished_s(record: dict[str, Any]) -> float:
    """In Unix time."""
    return float(record["started_s"] + record["duration_s"])
