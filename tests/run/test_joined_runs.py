"""Whole runs that generators join as processes, with weights by shared memory or by a socket of their own."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.free_ports import free_port
from tailrace.reporting.summary import read_summary
from tailrace.run.orchestrator import RUN_ENDED
from tests.run.runs import IMPORTS, PATIENCE_S, Command, command, records

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

ELASTIC = ("--generator.replicas", "{min = 1, max = 2}", "--generator.router.report_every_s", "0.1")
TIMES, STEPS, WINDOW, LEARNED = 10, 400, 20, 0.8


@contextmanager
def joining(parent: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`tailrace serve --join` as a process, which is gone afterwards."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tailrace"), "serve", *arguments],
        cwd=parent,
        env={**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def told(run: Command, kind: str, name: str = "generator-1") -> list[dict[str, Any]]:
    """What the run told of one generator."""
    events = records(run.folder / "events.jsonl")
    return [event for event in events if event["type"] == kind and event["name"] == name]


def newest(run: Command, metric: str) -> float:
    lines = records(run.folder / "metrics.jsonl")
    return float(next((line[metric] for line in reversed(lines) if metric in line), -1.0))


def rewards(run: Command) -> list[float]:
    """Mean of each step."""
    return [line["reward/mean"] for line in records(run.folder / "metrics.jsonl") if "reward/mean" in line]


def require_nothing_lost(run: Command, printed: str) -> None:
    ledger = read_summary(run.folder).ledger
    assert ledger.balances
    assert ledger.by_state["failed"] == 0, printed
    assert set(ledger.by_reason["cancelled"]) <= {RUN_ENDED, "SIGTERM"}


def test_generators_join_a_run_by_its_folder_and_by_its_address_and_leave_it(tmp_path: Path) -> None:
    address, listens = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    with command(tmp_path, *ELASTIC, "--generator.join_address", address, "--max_steps", "10000") as run:
        with joining(tmp_path, "--join", "run") as guest:
            run.wait_until(lambda: newest(run, "generator/generator-1/policy_version") > 0)
            run.wait_until(lambda: newest(run, "generator/generator-1/requests") > 0)
            guest.send_signal(signal.SIGTERM)
            run.wait_until(lambda: bool(told(run, "ReplicaLeft")))
            assert guest.wait(PATIENCE_S) == 143
        assert told(run, "ReplicaLeft")[0]["in_order"]
        with joining(tmp_path, "--join", address, "--address", listens) as guest:
            run.wait_until(lambda: len(told(run, "ReplicaJoined")) == 2)
            run.wait_until(lambda: newest(run, "generator/generator-1/policy_version") > 0)
            run.process.terminate()
            status, printed = run.wait()
            assert (status, run.leftovers()) == (143, []), printed
            assert guest.wait(PATIENCE_S) == 0
    require_nothing_lost(run, printed)
    assert not (run.folder / "join.json").exists()
    assert read_summary(run.folder).cpu_s is None  # those that joined took some that is not known here


def test_a_generator_that_joined_ends_when_its_run_is_killed(tmp_path: Path) -> None:
    with (
        command(tmp_path, *ELASTIC, "--max_steps", "10000") as run,
        joining(tmp_path, "--join", "run") as guest,
    ):
        run.wait_until(lambda: bool(told(run, "ReplicaJoined")))
        run.process.kill()
        printed, _ = guest.communicate(timeout=PATIENCE_S)
        assert (guest.returncode, "the run that this generator joined is gone" in printed) == (1, True), printed


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_quickstart_learns_while_a_generator_joins_and_leaves_ten_times(tmp_path: Path) -> None:
    with command(tmp_path, *ELASTIC, "--max_steps", str(STEPS), is_tiny=False) as run:
        for number in range(TIMES):
            with joining(tmp_path, "--join", "run") as guest:
                run.wait_until(lambda number=number: len(told(run, "ReplicaJoined")) == number + 1)
                steps = len(records(run.folder / "metrics.jsonl"))
                run.wait_for_steps(steps + 2)
                assert psutil.pid_exists(guest.pid)
                guest.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
                run.wait_until(lambda number=number: len(told(run, "ReplicaLeft")) == number + 1)
        assert [left["in_order"] for left in told(run, "ReplicaLeft")] == [True, False] * (TIMES // 2)
        run.wait_until(lambda: statistics.fmean(rewards(run)[-WINDOW:]) > LEARNED)
        run.process.terminate()
        _, printed = run.wait()
    require_nothing_lost(run, printed)
    assert read_summary(run.folder).staleness_max <= 4
