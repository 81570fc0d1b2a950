"""Whole runs whose agents are programs: beside the scheduler and in agent workers, and whatever ends the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tailrace.environments.programs.marked import marks
from tailrace.run.evaluating import evaluate_model
from tests.run.runs import PATIENCE_S, ROLES, command, require_rise, rollouts, run_inline, tiny_settings
from tests.support.descendants import still_run

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes through /proc")

ASKING = ("--environment.name", "tests.support.program_environments:asking")
SLEEPING = (*ASKING, "--environment.args.behave", "leave a daemon and hang")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs of this test have their folders, and by which they are known."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def alive(temporary: Path) -> list[psutil.Process]:
    """Programs of this test, and what they started."""
    found = []
    for pid, _ in marks():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                found.append(process)
    return found


def left(temporary: Path) -> list[object]:
    return [*alive(temporary), *temporary.glob("tailrace-programs-*")]


def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("agent_workers", ["0", "1"])
@pytest.mark.parametrize("roles", ROLES)
def test_programs_are_trained_on_and_evaluated(
    tmp_path: Path, temporary: Path, agent_workers: str, roles: tuple[str, ...]
) -> None:
    more = ("--rollouts.agent_workers", agent_workers, "--evaluation.every_steps", "1", "--max_steps", "2")
    with command(tmp_path, *roles, *ASKING, *more) as run:
        status, printed = run.wait()
    assert status == 0, printed
    records = [record for record in rollouts(run.folder) if record["outcome"]["state"] == "trained"]
    assert len(records) == 8
    assert all(record["columns"]["exit_status"] == 0 for record in records)
    assert all(record["messages"][-1]["role"] == "assistant" for record in records)
    evaluated = list((run.folder / "rollouts").glob("evaluation_*.jsonl"))
    assert evaluated
    assert left(temporary) == []


async def test_the_reward_of_a_program_rises(tmp_path: Path) -> None:
    """The mean reward of the last three steps is above that of the first three: by 0.23 when the margin was set."""
    few = ("--rollouts.group_size", "8", "--rollouts.max_tokens", "32", "--scheduling.batch_size", "32")
    more = ("--scheduling.row_tokens", "1024", "--generator.slots", "32", "--generator.max_cache_tokens", "1024")
    brief = ("--environment.name", "tests.support.program_environments:brief", "--max_steps", "12")
    summary = await run_inline(tmp_path, *brief, *few, *more)
    assert summary.steps == 12, summary
    require_rise(tmp_path / "run", steps=12, window=3, margin=0.1)


async def test_an_evaluation_alone_starts_programs_too(tmp_path: Path) -> None:
    settings = tiny_settings(*ASKING, "--placement", "local", parent=tmp_path)
    (one,) = await evaluate_model(settings)
    assert len(one.result.rewards) == 2
    assert all(rollout.messages[-1]["role"] == "assistant" for rollout in one.rollouts)


@pytest.mark.parametrize("agent_workers", ["0", "1"])
@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_program_behind(
    tmp_path: Path, temporary: Path, agent_workers: str, number: signal.Signals, roles: tuple[str, ...]
) -> None:
    with command(tmp_path, *roles, *SLEEPING, "--rollouts.agent_workers", agent_workers) as run:
        run.wait_until(lambda: len(alive(temporary)) >= 4)
        started = alive(temporary)
        os.kill(run.pid, number)
        status, printed = run.wait()
        assert status == (143 if number == signal.SIGTERM else -number), printed
        assert still_run(started, PATIENCE_S) == []
        until(lambda: not left(temporary))


def test_a_command_that_is_missing_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    with command(tmp_path, "--environment.name", "tests.support.program_environments:missing") as run:
        status, printed = run.wait()
    assert (status, "the command 'no-such-program-here' is not on the PATH" in printed) == (2, True), printed
    assert not run.folder.exists()


async def test_a_run_says_what_its_program_printed_last(tmp_path: Path) -> None:
    summary = await run_inline(
        tmp_path,
        *ASKING,
        *("--environment.args.behave", "exit", "--rollouts.rollout_errors.on_error", "raise"),
        *("--max_steps", "1"),
    )
    assert summary.exit_code == 1
    assert "ended with status 3; the end of its output:\nfirst line\nthe last line" in summary.reason
