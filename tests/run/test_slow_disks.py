"""A disk that blocks or refuses costs what was to be written, and nothing else of a run."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from tailrace.errors import DataError
from tailrace.lifecycle.processes import STACKS_S
from tailrace.records import RunStatus, TrainerEnded
from tailrace.reporting.summary import read_summary
from tailrace.run import training, watchdog
from tailrace.tracing.background import BackgroundWriter
from tailrace.training.checkpoints.files import StagedCheckpoint
from tailrace.transport.events import log
from tests.run.runs import PATIENCE_S, RESUMED, environment, records, run_inline
from tests.support.event_files import read_events


async def until_training_ended(events: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (events.exists() and any(isinstance(event, TrainerEnded) for event in read_events(events))):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_run_trains_on_while_metrics_hang_and_rollouts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_again, opened = threading.Event(), Path.open

    def open_on_a_bad_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if path.name == "metrics.jsonl" and "a" in mode:
            assert works_again.wait(PATIENCE_S)
        if path.parent.name == "rollouts" and "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_on_a_bad_disk)
    running = asyncio.create_task(run_inline(tmp_path, "--max_steps", "4", "--observability.queue_records", "2"))
    ended = asyncio.create_task(until_training_ended(tmp_path / "run" / "events.jsonl"))
    await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
    works_again.set()
    await ended
    summary = await running
    assert (summary.steps, summary.exit_code) == (4, 0)
    written = [record["step"] for record in records(tmp_path / "run" / "metrics.jsonl")]
    assert summary.dropped_records >= 1
    assert summary.dropped_records >= 4 - len(written)


async def test_metrics_and_rollouts_are_written_while_tokens_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_again, opened = threading.Event(), Path.open

    def open_on_a_slow_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if path.parent.name == "tokens":
            assert works_again.wait(PATIENCE_S)
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_on_a_slow_disk)
    folder = tmp_path / "run"
    written = [folder / "rollouts" / f"step_{step:06d}.jsonl" for step in (1, 2, 3)]
    running = asyncio.create_task(run_inline(tmp_path, "--max_steps", "3", "--observability.tokens_every_steps", "1"))
    await until_training_ended(folder / "events.jsonl")
    try:
        async with asyncio.timeout(20):
            while not all(path.exists() for path in written):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [record["step"] for record in records(folder / "metrics.jsonl")] == [1, 2, 3]
        assert [*(folder / "tokens").glob("step_??????.parquet")] == []  # beside what the trainer exports
    finally:
        works_again.set()
        summary = await running
    assert (summary.exit_code, summary.dropped_records) == (0, 0)
    assert {path.stem for path in (folder / "tokens").glob("*.parquet")} >= {path.stem for path in written}


async def test_after_a_notice_records_are_waited_for_no_longer_though_the_last_save_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_again, opened, written = threading.Event(), Path.open, StagedCheckpoint.write
    metrics = tmp_path / "run" / "metrics.jsonl"

    def open_on_a_bad_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if path.name == metrics.name and "a" in mode and path.exists():
            works_again.wait(PATIENCE_S)
        return opened(path, mode, *args, **options)

    def write_on_a_slow_disk(staged: StagedCheckpoint) -> Path:
        time.sleep(2.0)
        return written(staged)

    monkeypatch.setattr(Path, "open", open_on_a_bad_disk)
    monkeypatch.setattr(StagedCheckpoint, "write", write_on_a_slow_disk)
    monkeypatch.setattr(training, "HURRIED_WRITES_S", 1.0)
    monkeypatch.setattr(training, "_LARGEST_WRITE_S", 5.0)
    noticed = (*environment("signalling"), "--environment.args.number", str(int(signal.SIGUSR1)))
    hasty = ("--environment.args.after", str(metrics), "--shutdown.grace_s", "0.3", "--max_steps", "1000")
    summary = await run_inline(tmp_path, *noticed, *hasty)
    works_again.set()
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "did not answer a request to stop within 0.3 s" in summary.reason
    assert "has not finished its writes within 1 s" in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


async def test_from_a_sigterm_after_training_on_records_are_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_again, opened, closed = threading.Event(), Path.open, BackgroundWriter.close
    terminates = iter([threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))])

    def open_on_a_bad_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if path.name == "metrics.jsonl" and "a" in mode:
            works_again.wait(PATIENCE_S)
        return opened(path, mode, *args, **options)

    def close_while_terminated(writer: BackgroundWriter, timeout_s: float = 10.0) -> bool:
        if timeout_s == training._LARGEST_WRITE_S:  # not the trace's
            for terminate in terminates:  # one of the two threads that are closed at once
                terminate.start()
        return closed(writer, timeout_s)

    monkeypatch.setattr(Path, "open", open_on_a_bad_disk)
    monkeypatch.setattr(BackgroundWriter, "close", close_while_terminated)
    monkeypatch.setattr(training, "HURRIED_WRITES_S", 1.0)
    monkeypatch.setattr(training, "_LARGEST_WRITE_S", 15.0)
    summary = await run_inline(tmp_path, "--max_steps", "2")
    works_again.set()
    assert (summary.status, summary.exit_code) == (RunStatus.FINISHED, 0)
    assert summary.dropped_records > 0
    assert "has not finished its writes within 1 s" in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


@pytest.mark.parametrize("first", [b'{"type":"TrainerStarted"', b'{"type":"StepTrained"'])
async def test_a_full_disk_under_the_event_log_fails_the_run_in_time_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    written, is_full = os.write, threading.Event()

    def write_until_full(file: int, content: bytes) -> int:
        is_event = content.startswith(b'{"type":')
        if is_event and content.startswith(first):
            is_full.set()
        if is_event and is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, content)

    monkeypatch.setattr(os, "write", write_until_full)
    async with asyncio.timeout(PATIENCE_S):
        summary = await run_inline(tmp_path, "--max_steps", "4")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "cannot append to the event log" in summary.reason
    assert "No space left on device" in summary.reason
    assert summary.ledger.balances
    assert read_summary(tmp_path / "run") == summary
    kept = [event["type"] for event in records(tmp_path / "run" / "events.jsonl")]
    is_later = first == b'{"type":"StepTrained"'
    of_trainer = [kind for kind in kept if kind != "ReplicaJoined"]
    assert of_trainer == ["TrainerStarted", "ModelStateDictPublished"] * is_later


@pytest.mark.parametrize("disk", ["refuses", "hangs"])
async def test_a_run_that_stands_still_ends_though_its_disk_takes_no_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    works_again, opened = threading.Event(), Path.open

    def open_on_a_bad_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if path.name == "orchestrator.log" and mode == "a":
            if disk == "hangs":
                works_again.wait(PATIENCE_S)
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_on_a_bad_disk)
    monkeypatch.setattr(watchdog, "_WRITES_S", STACKS_S + 0.5)
    async with asyncio.timeout(PATIENCE_S / 2):
        summary = await run_inline(tmp_path, *environment("waiting"), "--observability.watchdog_s", "2")
    works_again.set()
    assert summary.status is RunStatus.FAILED
    assert "(observability.watchdog_s)" in summary.reason


async def test_a_run_that_stands_still_ends_though_the_disk_under_its_event_log_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_again, written = threading.Event(), os.write

    def write_on_a_bad_disk(file: int, content: bytes) -> int:
        if content.startswith(b'{"type":"StepTrained"'):
            works_again.wait(2 * PATIENCE_S)
        return written(file, content)

    monkeypatch.setattr(os, "write", write_on_a_bad_disk)
    monkeypatch.setattr(log, "_HANGS_S", 0.5)
    brief = ("--shutdown.grace_s", "1", "--shutdown.last_save_s", "1")
    async with asyncio.timeout(PATIENCE_S):
        summary = await run_inline(tmp_path, "--max_steps", "6", "--observability.watchdog_s", "2", *brief)
    works_again.set()
    assert summary.status is RunStatus.FAILED
    assert "(observability.watchdog_s)" in summary.reason


@pytest.mark.parametrize(("name", "is_file"), [("events.jsonl", False), ("logs", True), ("config.toml.part", False)])
async def test_what_cannot_be_written_of_a_run_s_folder_is_told_in_one_sentence(
    tmp_path: Path, name: str, is_file: bool
) -> None:
    path = tmp_path / "run" / name
    if is_file:
        path.parent.mkdir()
        path.write_bytes(b"")
    else:
        path.mkdir(parents=True)
    with pytest.raises(DataError, match=rf"cannot write the run folder .*run: .*{name}"):
        await run_inline(tmp_path, "--max_steps", "1", *RESUMED)
