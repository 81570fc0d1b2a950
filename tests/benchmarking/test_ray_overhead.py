"""What `benchmarks/ray_overhead.py` counts of Ray's own processes, and what it judges."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks import ray_overhead
from benchmarks.ray_overhead import Look, Run

STEPS = 200
TOKENS = 100
COMMAND = f"""#!{sys.executable}
import time
from pathlib import Path

folder = Path("runs/quickstart")
folder.mkdir(parents=True)
for _ in range({STEPS}):
    with (folder / "metrics.jsonl").open("a") as metrics:
        print('{{"bias/trained_tokens": {TOKENS}}}', file=metrics)
    time.sleep(0.005)
"""


class Daemon:
    """A process of Ray's that belongs to no role, and so is never stopped."""

    def __init__(self) -> None:
        self.times = SimpleNamespace(user=0.0, system=0.0)

    def cpu_times(self) -> SimpleNamespace:
        return self.times


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def daemons(daemon: Daemon) -> list[Daemon]:
    return [daemon]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: list[Daemon]) -> Run:
    """Of a command that only records steps."""
    command = tmp_path / "tailrace"
    command.write_text(COMMAND)
    command.chmod(0o755)
    monkeypatch.setattr(ray_overhead, "TAILRACE", command)
    ray = SimpleNamespace(address="nowhere", processes=lambda: ([], daemons))
    return Run(tmp_path, STEPS, ray)  # type: ignore[arg-type]


def test_what_daemons_take_while_the_run_is_stopped_is_not_its(run: Run, daemon: Daemon) -> None:
    while not run.looks:
        run.go_on(STEPS, 0.1)
    seen = len(run.looks)
    daemon.times.system += 100.0
    run.go_on(STEPS)
    run.end()
    assert len(run.looks) > seen
    assert run.looks[-1].daemons_cpu_s == 0.0


@pytest.fixture
def works(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon computes for a second before each look at the run."""
    recorded = Run._recorded

    def look(run: Run) -> int:
        daemon.times.user += 1.0
        return recorded(run)

    monkeypatch.setattr(Run, "_recorded", look)


@pytest.mark.usefixtures("works")
def test_what_daemons_take_while_the_run_goes_on_is_counted(run: Run) -> None:
    run.go_on(STEPS)
    run.end()
    assert run.looks[-1].daemons_cpu_s > run.looks[0].daemons_cpu_s > 0.0


@pytest.mark.usefixtures("works")
def test_of_a_daemon_that_ended_nothing_is_taken_off_the_others(
    run: Run, daemon: Daemon, daemons: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Daemon()
    other.times.user = 100.0
    looks = iter([[daemon, other]])
    monkeypatch.setattr(run._ray, "processes", lambda: ([], next(looks, daemons)))
    run.go_on(STEPS)
    run.end()
    assert run.looks[0].daemons_cpu_s > 0.0


def test_the_cpu_time_of_daemons_is_judged(run: Run) -> None:
    run.go_on(STEPS)
    run.end()
    for daemons_s, met in ((0.0, True), (2.0, True), (5.0, False)):
        run.looks = [Look(0, 10.0, 1.0), Look(STEPS, 110.0, 1.0 + daemons_s)]
        per_s, counted_s = run.steady()
        assert counted_s == pytest.approx(daemons_s)
        rows = [ray_overhead.row("turn-0", TOKENS * STEPS / 100.0, per_s, counted_s, 1.0, quick=False)]
        assert [rows[0].met, ray_overhead.median(rows, quick=False).met] == [met, met]


def test_a_late_start_is_not_met() -> None:
    rows = [ray_overhead.row("turn-0", 100.0, 100.0, 0.0, start_s, quick=False) for start_s in (29.0, 31.0, 32.0)]
    assert [row.met for row in rows] == [True, False, False]
    assert ray_overhead.median(rows, quick=False).met is False
    assert ray_overhead.median(rows, quick=True).met is None
