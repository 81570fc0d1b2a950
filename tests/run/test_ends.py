"""Every way a run can end by itself or by a wish, and the exit code that tells which."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.cli import main
from tailrace.lifecycle.signals import until_stopped
from tailrace.records import RunStatus
from tailrace.reporting.metrics import StepMetrics
from tailrace.reporting.summary import RunSummary, read_summary
from tailrace.reporting.trackers.hub import Trackers
from tailrace.run import roles, started_roles, watchdog
from tailrace.run.callbacks import Callbacks
from tailrace.training.checkpoints.files import StagedCheckpoint
from tailrace.transport.events.log import FileEventLog
from tests.run.runs import (
    IMPORTS,
    PATIENCE_S,
    REPORT,
    RESUMED,
    ROLES,
    TINY,
    WITHOUT_MODEL,
    command,
    environment,
    records,
    run_inline,
    trained_tasks,
)
from tests.support.lost_output import closed_pipe, full_disk
from tests.support.run_environments import released

ASKING = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 75)]

FEW = (
    *("--environment.args.count", "5", "--environment.args.held_out", "0"),
    *("--max_steps", "unset", "--max_epochs", "1"),
)
"""Tasks that are all handed out within three steps."""


async def test_exhausted_data_finishes_the_run_with_a_last_partial_batch(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *FEW)
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 3)
    assert len(trained_tasks(tmp_path / "run")) == 10
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["batch/rollouts"] == 2
    rates = [line["training/learning_rate"] for line in lines]
    assert rates[0] > rates[1] > rates[2]  # its decay ends with the epochs


async def test_a_run_that_finishes_has_all_the_time_that_its_last_save_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StagedCheckpoint.write

    def write_slowly(staged: StagedCheckpoint) -> Path:
        time.sleep(1)
        return write(staged)

    monkeypatch.setattr(StagedCheckpoint, "write", write_slowly)
    summary = await run_inline(tmp_path, *FEW, "--shutdown.last_save_s", "0.1")
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 3)
    assert Path(summary.checkpoint_path).name == "step_000003"


@pytest.mark.parametrize(
    ("asked_by", "reason"),
    [
        ("a signal", "the trainer did not answer a request to stop within 0.1 s"),
        ("a callback", "the trainer did not answer a request to stop within 0.1 s"),
        ("the watchdog", "watchdog_s"),
    ],
)
async def test_a_last_save_that_hangs_is_given_up_once_a_run_that_finishes_is_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_by: str, reason: str
) -> None:
    hangs, goes_on, write = threading.Event(), threading.Event(), StagedCheckpoint.write

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 3 and asked_by == "a callback":
            hangs.wait(PATIENCE_S)
            raise ValueError("of a callback")

    def hang(staged: StagedCheckpoint) -> Path:
        hangs.set()
        if asked_by == "a signal":
            os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait(PATIENCE_S)
        return write(staged)

    monkeypatch.setattr(StagedCheckpoint, "write", hang)
    brief = ("--shutdown.last_save_s", "0.1", "--shutdown.grace_s", "0.1")
    watched = ("--observability.watchdog_s", "5" if asked_by == "the watchdog" else str(PATIENCE_S))
    running = asyncio.create_task(run_inline(tmp_path, *FEW, *brief, *watched, callbacks=Callbacks(on_step)))
    events = tmp_path / "run" / "events.jsonl"
    while not (running.done() or (events.exists() and "TrainerEnded" in events.read_text())):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    goes_on.set()
    with contextlib.suppress(ValueError):  # of the callback
        await running
    summary = read_summary(tmp_path / "run")
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 1, 3)
    assert events.read_text().count("TrainerEnded") == 1
    assert reason in summary.reason


async def test_what_fails_while_a_trainer_saves_its_last_step_is_no_reason_of_a_run_that_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, events = StagedCheckpoint.write, tmp_path / "run" / "events.jsonl"

    def on_step(metrics: StepMetrics) -> None:
        raise ValueError("of a callback")

    def write_once_it_failed(staged: StagedCheckpoint) -> Path:
        until_s = time.monotonic() + PATIENCE_S
        while "StopRequested" not in events.read_text() and time.monotonic() < until_s:
            time.sleep(0.01)
        return write(staged)

    monkeypatch.setattr(StagedCheckpoint, "write", write_once_it_failed)
    with pytest.raises(ValueError, match="of a callback"):
        await run_inline(tmp_path, "--max_steps", "1", callbacks=Callbacks(on_step))
    assert "on_step raised ValueError: of a callback" in events.read_text()
    summary = read_summary(tmp_path / "run")
    assert (summary.status, summary.reason) == (RunStatus.FINISHED, "max_steps = 1 reached")


async def test_nothing_to_train_on_fails_the_run_and_says_why(tmp_path: Path) -> None:
    summary = await run_inline(
        tmp_path, *environment("praising"), "--scheduling.filter_zero_spread", "true", "--max_steps", "5"
    )
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 1, 0)
    assert "nothing to train on" in summary.reason
    assert "zero_spread" in summary.reason
    assert summary.ledger.balances


async def test_a_run_that_has_learned_all_there_is_finishes(tmp_path: Path) -> None:
    chosen = (*environment("learned"), "--environment.args.after", "12", "--scheduling.filter_zero_spread", "true")
    summary = await run_inline(tmp_path, *chosen, "--max_steps", "1000")
    assert (summary.status, summary.exit_code) == (RunStatus.FINISHED, 0)
    assert summary.steps < 1000
    assert "converged: " in summary.reason
    assert "rollouts earned 1, the highest reward there was" in summary.reason
    assert Path(summary.checkpoint_path).is_dir()
    assert summary.ledger.balances


async def test_a_run_that_diverges_fails(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, "--max_steps", "20", "--trainer.loss.name", "tests.support.losses:overflowing")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert summary.steps < 20
    assert "finite" in summary.reason


async def test_an_engine_that_cannot_be_built_does_not_keep_the_trainer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("there is no engine")

    monkeypatch.setattr(roles, "engine_factory", broken)
    summary = await run_inline(tmp_path, "--max_steps", "1")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "the generator failed: there is no engine" in summary.reason
    assert "did not answer" not in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
async def test_a_run_whose_summary_or_report_cannot_be_written_does_not_end_with_status_0(
    tmp_path: Path, name: str
) -> None:
    running = asyncio.create_task(run_inline(tmp_path, *REPORT, "--max_steps", "2"))
    while not (tmp_path / "run" / "events.jsonl").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "run" / name).mkdir()  # where a file should go
    summary = await running
    assert (summary.status, summary.steps, summary.exit_code) == (RunStatus.FINISHED, 2, 1)
    assert f"the {name.partition('.')[0]} could not be written: [Errno 21] Is a directory" in summary.reason
    if name == "report.html":
        assert read_summary(tmp_path / "run") == summary


async def test_a_run_whose_report_cannot_be_drawn_ends_with_its_summary_and_tells_where(tmp_path: Path) -> None:
    running = asyncio.create_task(run_inline(tmp_path, *REPORT, "--max_steps", "1"))
    while not (tmp_path / "run" / "events.jsonl").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "wall_s": 0, "reward/mean": 1.7e308}\n')
    summary = await running
    assert (summary.status, summary.steps, summary.exit_code) == (RunStatus.FINISHED, 1, 1)
    assert "the report could not be written: " in summary.reason
    assert read_summary(tmp_path / "run") == summary
    assert "Traceback" in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


@pytest.mark.parametrize(("number", "code"), ASKING)
async def test_a_signal_stops_in_order_with_a_last_save(tmp_path: Path, number: int, code: int) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    signalling = (*environment("signalling"), "--environment.args.number", str(int(number)))
    summary = await run_inline(tmp_path, *signalling, "--environment.args.after", str(metrics), "--max_steps", "1000")
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, code)
    assert 1 <= summary.steps < 1000
    assert summary.checkpoint_path.endswith(f"step_{summary.steps:06d}")
    assert Path(summary.checkpoint_path).is_dir()
    assert (tmp_path / "run" / "summary.json").is_file()
    assert summary.ledger.balances


@pytest.mark.parametrize("code", [code for _, code in ASKING])
def test_a_command_that_a_signal_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    async def stopped(*_: object, **__: object) -> RunSummary:
        return RunSummary(name="run", status=RunStatus.CANCELLED, exit_code=code, checkpoint_path="step_000002")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tailrace.run.training.train", stopped)
    assert main(["train", "quickstart", "--name", "run"]) == code
    assert "go on with  tailrace train quickstart --name run --resume" in capsys.readouterr().out


@pytest.mark.parametrize("moment", [(FileEventLog, "close"), (Trackers, "summarise")], ids=["closing", "writing"])
@pytest.mark.parametrize(
    ("signals", "code"),
    [((None, signal.SIGINT), 0), ((signal.SIGUSR1, signal.SIGTERM), 75)],
    ids=["end", "notice"],
)
async def test_a_signal_after_the_end_of_a_run_takes_nothing_from_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: tuple[type, str],
    signals: tuple[signal.Signals | None, signal.Signals],
    code: int,
) -> None:
    ending, (first, then) = getattr(*moment), signals

    def ending_late(*arguments: object) -> object:
        signal.raise_signal(then)
        return ending(*arguments)

    monkeypatch.setattr(*moment, ending_late)
    chosen: tuple[str, ...] = ("--max_steps", "1")
    if first is not None:
        metrics = str(tmp_path / "run" / "metrics.jsonl")
        number = ("--environment.args.number", str(int(first)))
        chosen = (*environment("signalling"), *number, "--environment.args.after", metrics, "--max_steps", "1000")
    summary = await until_stopped(run_inline(tmp_path, *chosen))
    assert summary.exit_code == code
    assert summary.status is (RunStatus.FINISHED if first is None else RunStatus.CANCELLED)
    assert read_summary(tmp_path / "run") == summary


async def test_a_notice_of_preemption_in_the_folder_stops_with_a_last_save_and_is_not_there_for_the_next_start(
    tmp_path: Path,
) -> None:
    running = asyncio.create_task(run_inline(tmp_path, "--max_steps", "100000"))
    while not records(tmp_path / "run" / "metrics.jsonl"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "run" / "preempt").touch()
    summary = await running
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, 75)
    assert Path(summary.checkpoint_path).name == f"step_{summary.steps:06d}"
    (tmp_path / "run" / "preempt").touch()  # late: this process stands for the next one
    os.utime(tmp_path / "run" / "preempt", (0, psutil.Process().create_time() - 5))
    resumed = await run_inline(tmp_path, "--max_steps", str(summary.steps + 1), *RESUMED)
    assert (resumed.exit_code, resumed.steps) == (0, summary.steps + 1)
    assert not (tmp_path / "run" / "preempt").exists()


async def test_a_notice_of_preemption_that_comes_while_the_run_starts_is_heard(tmp_path: Path) -> None:
    await run_inline(tmp_path, "--max_steps", "1")
    (tmp_path / "run" / "preempt").touch()  # before anything of this start is there but its process
    summary = await run_inline(tmp_path, "--max_steps", "100000", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, 75)
    assert not (tmp_path / "run" / "preempt").exists()


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_in_which_nothing_moves_fails_and_every_process_tells_where_it_stands(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    watched = ("--observability.watchdog_s", "8", "--max_steps", "1")
    with command(tmp_path, *roles, *environment("waiting"), *watched) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (1, []), printed
    summary = read_summary(run.folder)
    assert summary.status is RunStatus.FAILED
    assert "nothing has moved for 0:0" in summary.reason
    assert "; the run waits for " in summary.reason
    assert "(observability.watchdog_s); where every process stood is at the end of its log in " in summary.reason
    for role in ("orchestrator", "trainer", "generator"):
        assert "thread 0x" in (run.folder / "logs" / f"{role}.log").read_text().lower(), role
    assert summary.ledger.balances


async def test_a_run_whose_process_stood_still_for_longer_than_the_watchdog_waits_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(started_roles, "STACKS_S", 0.0)
    until = tmp_path / "go on"
    held = (*environment("held"), "--environment.args.until", str(until))
    running = asyncio.create_task(run_inline(tmp_path, *held, "--observability.watchdog_s", "5", "--max_steps", "1"))
    while not (running.done() or Path(f"{until}.awaited").exists()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # the watchdog sees that nothing moves
    asyncio.get_running_loop().call_soon(time.sleep, 5.5)  # as if the process were suspended
    await asyncio.sleep(0.5)  # its due look is over
    until.touch()
    summary = await running
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)


def test_an_interrupted_command_says_how_to_stop_at_once_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    signalling = (*environment("signalling"), "--environment.args.after", "runs/run/metrics.jsonl")
    inline = ("--placement", "inline", "--observability.live", "off", "--name", "run", "--max_steps", "1000")
    assert main(["train", "quickstart", *TINY, *signalling, *inline]) == 130
    printed = capsys.readouterr()
    assert "stopping, with a last save: Ctrl-C again to stop at once" in printed.err
    assert "afterwards: tailrace train quickstart --name run --resume (from runs/run/checkpoints)\n" in printed.err
    assert "go on with  tailrace train quickstart --name run --resume\n" in printed.out


async def test_what_a_group_does_to_end_in_order_is_not_cut_short_by_the_end_of_the_trainer(tmp_path: Path) -> None:
    running = asyncio.create_task(run_inline(tmp_path, *environment("tidying"), "--max_steps", "1000"))
    while not records(tmp_path / "run" / "metrics.jsonl"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "run" / "preempt").touch()
    summary = await running
    assert (summary.status, summary.steps) == (RunStatus.CANCELLED, 1)
    assert "ignored its cancellation" not in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


async def test_agents_that_refuse_to_be_cancelled_hold_a_stop_up_until_its_deadline(tmp_path: Path) -> None:
    hasty = ("--shutdown.cancel_rollouts_s", "0.1")
    summary = await run_inline(tmp_path, *environment("stubborn"), *hasty, "--max_steps", "1")
    released.set()
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.CANCELLED, 130, 0)
    assert summary.ledger.balances
    assert "cancel_rollouts took longer" in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


def test_agents_that_refuse_every_cancellation_do_not_keep_the_command_from_ending(tmp_path: Path) -> None:
    hasty = ("--deadline_scale", "0.1", "--placement", "inline", "--max_steps", "1")
    with command(tmp_path, *environment("stubborn"), *hasty) as run:
        status, printed = run.wait()
    assert status == 130, printed
    log = (run.folder / "logs" / "orchestrator.log").read_text()
    assert "ignored its cancellation and is waited for no longer" in log
    assert "run_environments.py" in log
    assert "admitted" in printed  # the summary


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "environment 'closing' could not be closed: of the close"),
        ("exit", "environment 'closing' could not be closed: 3"),
        ("hang", "the close of environment 'closing' was given up before it had ended"),
    ],
)
async def test_an_environment_that_cannot_be_closed_is_named_and_changes_nothing_of_the_run(
    tmp_path: Path, how: str, says: str
) -> None:
    chosen = (*environment("closing"), "--environment.args.how", how, "--shutdown.cancel_rollouts_s", "2")
    summary = await run_inline(tmp_path, *chosen, "--max_steps", "1")
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 1)
    assert len(trained_tasks(tmp_path / "run")) == 4
    assert (tmp_path / "run" / "logs" / "orchestrator.log").read_text().count(says) == 1


@pytest.mark.parametrize("roles", ROLES)
def test_users_threads_that_never_return_do_not_keep_the_command_from_ending(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    on_the_loop = ("--rollouts.agent_workers", "0")
    with command(tmp_path, *roles, *environment("leaving_a_thread"), *on_the_loop, "--max_steps", "3") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "as they do not return" in (run.folder / "logs" / "orchestrator.log").read_text()
    assert "admitted" in printed  # the summary


@pytest.mark.parametrize("lost", [closed_pipe, full_disk])
def test_what_cannot_be_printed_in_the_end_changes_no_status(
    tmp_path: Path, lost: Callable[[], AbstractContextManager[Any]]
) -> None:
    chosen = [*TINY, *environment("words"), *WITHOUT_MODEL, "--name", "run", "--max_steps", "1"]
    with lost() as nowhere:
        done = subprocess.run(
            [sys.executable, "-m", "tailrace", "train", "quickstart", *chosen],
            cwd=tmp_path,
            env={**os.environ, **IMPORTS},
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, read_summary(tmp_path / "runs" / "run").exit_code) == (0, 0), done.stderr
    assert "Traceback" not in done.stderr
