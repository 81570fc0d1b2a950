"""The fault matrix: what becomes of a run whose trainer or generator does this to itself there, with scaled deadlines.

The roles have no model and never import torch (`light_roles`); processes, signals, sockets and files are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tests.run.runs import PATIENCE_S, Command, command, records
from tests.support.light_roles import FAULT, Fault

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

STEPS = 30
SCALED = (
    *("--placement", "tests.support.light_roles:LightLauncher", "--scheduling.max_staleness", "20"),
    *("--trainer.checkpoint_every_steps", "3", "--generator.router.report_every_s", "0.2"),
    *("--restarts.silence_s", "3", "--generator.router.progress_deadline_s", "8", "--restarts.backoff_s", "0.1"),
    *("--shutdown.terminate_s", "2", "--shutdown.close_event_log_s", "2", "--shutdown.stop_generators_s", "2"),
)


@contextmanager
def run_with(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, *overrides: str, steps: int = STEPS
) -> Iterator[tuple[Command, list[psutil.Process]]]:
    """The run, once the fault has happened, and its processes at that moment; none of them is left at the end."""
    monkeypatch.setenv(FAULT, fault.variable)
    with command(fault.mark.parent, *SCALED, *overrides, "--max_steps", str(steps)) as run:
        run.wait_until(fault.mark.exists)
        family = psutil.Process(run.pid).children(recursive=True)
        yield run, family
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        assert run.leftovers() == []
    assert read_summary(run.folder).ledger.balances


def require_finished(run: Command, steps: int = STEPS) -> str:
    """Every step is told once, and the ledger knows of nothing that failed; what the run printed."""
    status, printed = run.wait()
    summary = read_summary(run.folder)
    assert (status, summary.status, summary.steps) == (0, RunStatus.FINISHED, steps), printed
    assert [line["step"] for line in records(run.folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert summary.ledger.by_state["failed"] == 0
    assert (run.folder / "checkpoints" / f"step_{steps:06d}").is_dir()
    return printed


@pytest.mark.parametrize("role", ["trainer", "generator"])
@pytest.mark.parametrize(
    "fate",
    [
        ("startup", "killed", "left early, killed by SIGKILL"),
        ("startup", "stopped", "was killed: it was stopped, and gave no sign of life for "),
        ("step", "killed", "left early, killed by SIGKILL"),
        ("step", "stopped", "was killed: it was stopped, and gave no sign of life for "),
        ("step", "leaves", "left early, with status 0"),
    ],
)
def test_a_role_that_is_lost_is_replaced_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, fate: tuple[str, str, str]
) -> None:
    where, blow, told = fate
    with run_with(Fault(role, where, blow, tmp_path / "mark"), monkeypatch) as (run, _):
        printed = require_finished(run)
    assert f"{role} is started again: " in printed
    if (role, where, blow) != ("generator", "step", "stopped"):  # that one has requests, which may be missed before
        assert f"the {role} {told}" in printed


def test_a_trainer_that_is_killed_in_a_save_goes_on_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_with(Fault("trainer", "save", "killed", tmp_path / "mark"), monkeypatch) as (run, _):
        require_finished(run)


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_role_that_is_stopped_for_a_moment_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    patient = ("--restarts.silence_s", "60", "--generator.router.progress_deadline_s", "60")
    with run_with(Fault(role, "step", "stopped", tmp_path / "mark"), monkeypatch, *patient) as (run, _):
        time.sleep(1)
        os.kill(int((tmp_path / "mark").read_text()), signal.SIGCONT)
        printed = require_finished(run)
    assert "is started again" not in printed


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_role_that_does_not_end_is_killed_at_its_deadline_and_the_status_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    with run_with(Fault(role, "end", "hangs", tmp_path / "mark"), monkeypatch) as (run, _):
        require_finished(run)


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_role_that_never_comes_up_fails_the_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    with run_with(Fault(role, "startup", "killed", tmp_path / "mark", times=99), monkeypatch) as (run, _):
        status, printed = run.wait()
    summary = read_summary(run.folder)
    assert (status, summary.status, summary.steps) == (1, RunStatus.FAILED, 0), printed
    assert f"the {role} left early, killed by SIGKILL; the end of its log" in summary.reason
    assert len((tmp_path / "mark").read_text().split()) == 2  # it was started again once


def test_a_trainer_that_hangs_in_a_save_is_killed_within_the_grace_of_sigterm_and_the_checkpoint_before_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Fault("trainer", "save", "hangs", tmp_path / "mark")
    with run_with(hangs, monkeypatch, "--shutdown.grace_s", "3") as (run, _):
        run.process.terminate()
        status, printed = run.wait()
    summary = read_summary(run.folder)
    assert (status, summary.status) == (1, RunStatus.FAILED), printed
    assert "the trainer did not answer a request to stop within 3 s" in summary.reason
    assert [path.name for path in (run.folder / "checkpoints").glob("step_*")] == ["step_000003"]
