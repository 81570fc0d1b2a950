"""A run's folder is one run's at a time, and what a crash leaves holds nobody up."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tailrace.errors import DataError
from tailrace.run import ownership
from tailrace.run.ownership import LAPSES_AFTER_S, OWNER_FILE, Owner, may_be_alive, own_folder
from tests.run.runs import PATIENCE_S, RESUMED, ROLES, command, run_inline
from tests.support.descendants import still_run

ELSEWHERE = Owner(pid=7, host="node-12", kernel="another", started_at="2026-01-01T00:00:00+00:00")
HOLD = """
import sys, time
from pathlib import Path
from tailrace.run.ownership import own_folder
with own_folder(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""
STARTER = """
import subprocess, sys, time
from pathlib import Path
from tailrace.run.ownership import own_folder
with own_folder(Path(sys.argv[1])) as owned:
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(sleeping, pass_fds=[owned.descriptor]).pid, flush=True)
    time.sleep(600)
"""
LOOKING_OFTEN = """
import sys
from tailrace.cli import main
from tailrace.run import ownership
ownership.RENEWED_EVERY_S = 0.05
sys.exit(main(sys.argv[2:]))  # the first is the command that this stands for
"""


def left_by(owner: Owner, folder: Path, *, silent_s: float) -> Path:
    """What a file system without common locks shows of an owner elsewhere."""
    folder.mkdir(exist_ok=True)
    path = folder / OWNER_FILE
    path.write_bytes(msgspec.json.encode(owner))
    then_s = time.time() - silent_s
    os.utime(path, (then_s, then_s))
    return path


def has_closed_all(process: psutil.Process) -> bool:
    """What an exit does first: a process may be seen running a moment after its locks are gone."""
    try:
        return not os.listdir(f"/proc/{process.pid}/fd")
    except OSError:
        return True


def refused(folder: Path, message: str) -> None:
    with pytest.raises(DataError, match=message), own_folder(folder):
        pass


def test_an_owner_is_named_to_whoever_comes_second(tmp_path: Path) -> None:
    us = os.getpid()
    with own_folder(tmp_path / "run"):
        refused(tmp_path / "run", rf"process {us} on .*kill {us}")
    assert not (tmp_path / "run").exists()
    with own_folder(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / OWNER_FILE).read_text())["pid"] == us


def test_a_process_that_was_killed_owns_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        refused(tmp_path, f"process {owner.pid}")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert (tmp_path / OWNER_FILE).is_file()
    with own_folder(tmp_path) as owned:
        assert owned.before is not None
        assert owned.before.pid == owner.pid
    assert not list(tmp_path.iterdir())
    with own_folder(tmp_path) as owned:
        assert owned.before is None  # that one ended in order


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[psutil.Process]:
    """What a process that was killed in the folder `run` has started there."""
    command = [sys.executable, "-c", STARTER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        orphan = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    yield orphan
    if orphan.is_running():
        orphan.kill()


def test_an_orphan_that_does_not_end_is_named(
    tmp_path: Path, orphan: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "ORPHANS_END_S", 0.01)
    refused(tmp_path / "run", rf"was killed, and processes {orphan.pid} of it did not end within 0.01 s")
    orphan.kill()
    assert still_run([orphan], PATIENCE_S) == []  # on a busy machine that takes longer than the deadline above
    with own_folder(tmp_path / "run"):
        pass


def test_the_next_owner_waits_for_what_a_killed_one_started(
    tmp_path: Path, orphan: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def end_what_is_waited_for(message: str, *values: object) -> None:
        said.append(message % values)
        assert orphan.is_running()
        orphan.kill()

    monkeypatch.setattr(logging.getLogger("tailrace.run.ownership"), "warning", end_what_is_waited_for)
    with own_folder(tmp_path / "run"):
        assert has_closed_all(orphan)
    assert said == [f"waiting for processes of a run in {tmp_path / 'run'} that was killed, which still end"]


@pytest.mark.parametrize("roles", ROLES)
def test_a_folder_is_free_once_the_roles_of_a_killed_run_have_ended(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with command(tmp_path, *roles, "--max_steps", "1000") as run:
        run.wait_for_steps(1)
        roles = [run.role("trainer"), run.role("generator")]
        run.process.kill()
        run.process.wait()
        with own_folder(run.folder):
            assert all(map(has_closed_all, roles))


def test_an_owner_whose_lock_cannot_be_seen_is_believed_until_it_falls_silent(tmp_path: Path) -> None:
    path = left_by(ELSEWHERE, tmp_path / "run", silent_s=30)
    refused(tmp_path / "run", r"process 7 on node-12.*start again 120 s after its end")
    path.unlink()
    path.parent.rmdir()
    left_by(ELSEWHERE, tmp_path / "run", silent_s=LAPSES_AFTER_S + 1)
    with own_folder(tmp_path / "run"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_an_owner_that_lost_its_folder_learns_of_it_and_leaves_the_next_one_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "RENEWED_EVERY_S", 0.01)
    with own_folder(tmp_path / "run") as owned:
        path = tmp_path / "run" / OWNER_FILE
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            assert not owned.lost.done()
            time.sleep(0.01)
        left_by(ELSEWHERE, tmp_path / "run", silent_s=0)
        owned.lost.result(PATIENCE_S)
    assert json.loads(path.read_text())["pid"] == ELSEWHERE.pid


@pytest.mark.parametrize("next_owner", ["goes on", "has ended"])
def test_a_run_that_lost_its_folder_ends_at_once_and_writes_no_more(tmp_path: Path, next_owner: str) -> None:
    within = (sys.executable, "-c", LOOKING_OFTEN)
    with command(tmp_path, "--max_steps", "100000", "--placement", "inline", within=within) as run:
        run.wait_for_steps(1)
        if next_owner == "goes on":
            left_by(ELSEWHERE, run.folder, silent_s=0)
        else:
            (run.folder / OWNER_FILE).unlink()
        status, printed = run.wait()
    assert status == 1, printed
    assert "this run ends at once, with no save" in " ".join(printed.split())
    assert (run.folder / OWNER_FILE).exists() == (next_owner == "goes on")
    assert not (run.folder / "summary.json").exists()


async def test_a_resume_waits_for_an_owner_elsewhere_that_was_killed_to_fall_silent(tmp_path: Path) -> None:
    await run_inline(tmp_path, "--max_steps", "1")
    left_by(ELSEWHERE, tmp_path / "run", silent_s=LAPSES_AFTER_S - 0.5)
    summary = await run_inline(tmp_path, "--max_steps", "2", *RESUMED)
    assert (summary.exit_code, summary.steps) == (0, 2)


async def test_so_does_a_first_start(tmp_path: Path) -> None:
    """The machine was lost before the run had anything to resume."""
    left_by(ELSEWHERE, tmp_path / "run", silent_s=LAPSES_AFTER_S - 0.5)
    summary = await run_inline(tmp_path, "--max_steps", "1")
    assert (summary.exit_code, summary.steps) == (0, 1)


async def test_one_that_renews_its_file_is_waited_for_no_longer_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_LOOK_S", 0.01)
    path = left_by(ELSEWHERE, tmp_path / "run", silent_s=30)
    said = asyncio.Event()
    monkeypatch.setattr(logging.getLogger("tailrace.run.ownership"), "warning", lambda *_: said.set())
    resuming = asyncio.create_task(run_inline(tmp_path, *RESUMED))
    await asyncio.wait({resuming, asyncio.create_task(said.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not resuming.done()
    os.utime(path)
    with pytest.raises(DataError, match=r"process 7 on node-12"):
        await resuming


@pytest.mark.parametrize(
    ("kernel", "is_locked", "silent_s", "alive"),
    [
        ("ours", True, 0.0, False),
        ("ours", False, 0.0, True),
        ("ours", False, -86_400.0, False),
        ("ours", False, LAPSES_AFTER_S, False),
        ("another", True, 0.0, True),
        ("another", True, LAPSES_AFTER_S, False),
    ],
)
def test_only_a_lock_of_this_kernel_proves_that_an_owner_is_gone(
    kernel: str, is_locked: bool, silent_s: float, alive: bool
) -> None:
    ours = Owner.of_this_process()
    owner = ours if kernel == "ours" else ELSEWHERE
    assert may_be_alive(owner, is_locked_by_us=is_locked, silent_s=silent_s) is alive


def test_a_file_that_a_crash_cut_short_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / OWNER_FILE).write_text('{"pid": 1')
    with own_folder(tmp_path):
        pass


async def test_a_run_beside_a_live_one_of_its_name_is_refused_and_one_after_its_end_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with command(tmp_path, "--max_steps", "1000", "--placement", "inline") as run:
        await asyncio.to_thread(run.wait_for_steps, 1)
        before = (run.folder / "config.toml").read_bytes()
        for resume in [(), ("--resume",)]:
            with pytest.raises(DataError, match=f"a run is going on in .*process {run.pid}"):
                await run_inline(run.folder.parent, "--max_steps", "1", *resume)
        assert (run.folder / "config.toml").read_bytes() == before
        run.process.kill()
        run.process.wait()
    assert (run.folder / OWNER_FILE).is_file()
    with pytest.raises(DataError, match="exists already"):  # the most likely next command
        await run_inline(run.folder.parent, "--max_steps", "1")
    told = caplog.text
    summary = await run_inline(run.folder.parent, "--max_steps", "1", *RESUMED)
    assert summary.exit_code == 0
    assert not (run.folder / OWNER_FILE).exists()
    assert f"the start before this one (process {run.pid} on " in told
    assert "did not end in order: it was killed, stopped at once, or lost its machine" in told
