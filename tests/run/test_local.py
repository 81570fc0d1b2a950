"""Runs whose roles are processes of their own: whatever happens to one, the command tells, and nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.run.runs import IMPORTS, PATIENCE_S, REPORT, RESUMED, ROLES, Command, command, records, rollouts, run_inline
from tests.support.chrome_trace import crossings, read_trace, spans, tracks
from tests.support.descendants import still_run

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")


def family(run: Command) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return still_run(processes, PATIENCE_S) == []


def assert_the_trace_shows_every_process(path: Path) -> None:
    events = read_trace(path)
    shown = tracks(events)
    assert shown.keys() == {"orchestrator", "trainer", "generator"}
    assert shown["orchestrator"] >= {"rollouts", "batches", "weights"}
    assert shown["trainer"] >= {"optimizer steps", "weights"}
    assert shown["generator"] >= {"requests", "weights"}
    for name in ("rollout", "generate", "score", "form_batch", "send_batch", "train", "publish", "request"):
        assert spans(events, name), name
    assert crossings(events) == []


async def test_a_run_finishes_and_the_orchestrator_never_imports_torch(tmp_path: Path) -> None:
    with command(tmp_path, *REPORT, "--max_steps", "3", "--rollouts.agent_workers", "0") as run:
        run.wait_for_steps(1)
        children = family(run)
        status, printed = run.wait()
        assert (status, run.leftovers(), all_gone(children)) == (0, [], True), printed
    assert "finished: max_steps = 3 reached" in printed
    assert {path.name for path in run.folder.iterdir()} == {
        *("config.toml", "events.jsonl", "metrics.jsonl", "summary.json", "report.html", "reward.png"),
        *("recipe.toml", "modules_folder.txt", "rollouts", "checkpoints", "scheduler", "logs", "trace.json"),
    }
    assert_the_trace_shows_every_process(run.folder / "trace.json")
    assert {path.name for path in (run.folder / "logs").iterdir()} == {
        *("orchestrator.log", "trainer.log", "generator.log"),
    }
    trained = [record for record in rollouts(run.folder) if record["outcome"]["state"] == "trained"]
    assert len(trained) == 12
    assert not any(record["columns"]["torch_is_imported"] for record in trained)


async def test_ctrl_c_stops_in_order_and_resume_goes_on(tmp_path: Path) -> None:
    with command(tmp_path, "--max_steps", "10000") as run:
        run.wait_for_steps(2)
        children = family(run)
        run.process.send_signal(signal.SIGINT)
        status, printed = run.wait()
        assert (status, run.leftovers(), all_gone(children)) == (130, [], True), printed
    steps = records(run.folder / "metrics.jsonl")[-1]["step"]
    assert f"checkpoint  runs/run/checkpoints/step_{steps:06d}" in printed
    summary = await run_inline(tmp_path / "runs", "--max_steps", str(steps + 1), *RESUMED)
    assert (summary.exit_code, summary.steps) == (0, steps + 1)


@pytest.mark.parametrize("roles", ROLES)
def test_ctrl_c_twice_ends_at_once_with_nothing_left(tmp_path: Path, roles: tuple[str, ...]) -> None:
    saving = ("--max_steps", "10000", "--trainer.checkpoint_every_steps", "1")
    with command(tmp_path, *roles, *saving) as run:
        run.wait_until(lambda: any((run.folder / "checkpoints").glob("step_*")))
        children = family(run)
        for child in children:
            child.suspend()  # nobody answers the first one
        run.process.send_signal(signal.SIGINT)
        run.wait_until(lambda: "stopping: " in (run.folder / "logs" / "orchestrator.log").read_text())
        run.process.send_signal(signal.SIGINT)
        status, printed = run.wait()
        assert (status, run.leftovers(), all_gone(children)) == (130, [], True), printed
    on = r"go on from runs/run/checkpoints/step_\d+ with tailrace train quickstart --name run --resume$"
    assert re.search(on, printed, re.MULTILINE), printed


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_role_that_is_killed_fails_the_run_by_its_name(tmp_path: Path, role: str, roles: tuple[str, ...]) -> None:
    with command(tmp_path, *roles, "--max_steps", "10000", "--restarts.per_role", "0") as run:
        run.wait_for_steps(1)
        children = family(run)
        run.role(role).kill()
        status, printed = run.wait()
        assert (status, run.leftovers(), all_gone(children)) == (1, [], True), printed
    assert f"the {role} left early, killed by SIGKILL; the end of its log" in printed
    assert (run.folder / "summary.json").is_file()


async def test_children_of_a_killed_orchestrator_end_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    with command(tmp_path, "--max_steps", "10000", "--trainer.checkpoint_every_steps", "2") as run:
        run.wait_for_steps(3)
        children = family(run)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert all_gone(children)
    told = len(records(run.folder / "metrics.jsonl"))
    saved = max(int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints").glob("step_*"))
    summary = await run_inline(tmp_path / "runs", "--max_steps", str(max(told, saved) + 2), *RESUMED)
    assert (summary.exit_code, summary.steps) == (0, max(told, saved) + 2)
    steps = [line["step"] for line in records(run.folder / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    # The trainer may have saved what the orchestrator had no time to write of: those lines died with it.
    assert set(range(1, summary.steps + 1)) - set(steps) <= set(range(told + 1, saved + 1))


def test_a_full_disk_ends_the_run_honestly(tmp_path: Path) -> None:
    """The folder of runs is a small file system of its own, in a mount namespace that ends with the command."""
    script = (
        'mount -t tmpfs -o size=3m tailrace runs && exec "$0" train quickstart --name run --placement inline '
        "--max_steps 2 --environment.name tests.support.run_environments:words --rollouts.group_size 2 "
        "--scheduling.batch_size 4 --rollouts.max_tokens 6; "
    )
    (tmp_path / "runs").mkdir()
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(Path(sys.executable).with_name("tailrace"))],
        cwd=tmp_path,
        env={**os.environ, **IMPORTS},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "the disk is full" in done.stdout + done.stderr
