"""Standard input, output or error closed at the start, or taking nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.support.lost_output import closed_pipe, full_disk

from tailrace.environments.installed import pinned

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]

OWN_PROGRAM = """
import asyncio, sys
from tailrace.lifecycle.event_loop import run_on_event_loop

async def work():
    print("progress")
    children = [await asyncio.create_subprocess_exec("cat", stdout=None) for _ in range(2)]
    return max([await child.wait() for child in children])

sys.exit(run_on_event_loop(work()))
"""


@pytest.mark.parametrize("closed", CLOSED)
def test_a_program_on_an_event_loop_ends_as_if_the_null_device_were_there(closed: str) -> None:
    """Closing a loop whose own descriptor has the number of a closed one aborts the process."""
    shell = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, OWN_PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "arguments",
    [("settings",), pytest.param(("replay", "--synthetic", "2x2", "--repeat", "1"), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("closed", CLOSED)
def test_so_does_a_command(closed: str, arguments: tuple[str, ...]) -> None:
    shell = f'exec "$0" -m tailrace "$@" {closed}'
    done = subprocess.run(["sh", "-c", shell, sys.executable, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def run(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[bytes]:
    """With standard output buffered, as it is by default."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run([sys.executable, "-m", "tailrace", *arguments], env=variables, check=False, **streams)


@pytest.mark.parametrize("command", ["recipes", "settings", "--help"])
def test_a_result_that_a_full_disk_does_not_take_is_told_in_a_sentence(command: str) -> None:
    with full_disk() as full:
        done = run([command], stdout=full, stderr=subprocess.PIPE)
    expected = "error standard output takes nothing more: No space left on device"
    assert (done.returncode, done.stderr.decode().strip()) == (1, expected)


@pytest.mark.parametrize("command", ["recipes", "settings", "--help"])
def test_one_that_nobody_reads_on_ends_quietly(command: str) -> None:
    with closed_pipe() as pipe:
        done = run([command], stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("lost", [full_disk, closed_pipe])
@pytest.mark.parametrize("wrong", [["trian"], ["train", "--dry-run"]])
def test_an_error_that_nobody_can_be_told_has_its_status_all_the_same(
    lost: Callable[[], AbstractContextManager[object]], wrong: list[str]
) -> None:
    with lost() as nowhere:
        done = run(wrong, stdout=subprocess.PIPE, stderr=nowhere)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("lost", [full_disk, closed_pipe])
def test_what_a_command_says_beside_its_work_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Callable[[], AbstractContextManager[object]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    installed = pinned("verifiers==0.4.0")
    installed.python.parent.mkdir(parents=True)
    installed.python.touch()
    installed.mark()
    with lost() as nowhere:
        done = run(["environments", "install", str(installed)], stdout=nowhere, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
