"""Processes that carry a mark in their environment: all that a program started, wherever it went.

A child inherits its parent's environment, so a daemon that left its session and process group is found as well; only
one that wiped its environment, too, is not. Linux: elsewhere nothing is found, and only a process group is ended.

As a program this file is the keeper of a process that starts programs: it waits for the end of its standard input,
which comes when that process ends, however it ended, and then ends what carries the mark and removes a folder. It
imports nothing but Python's own modules, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "TAILRACE_PROGRAM"
"""Variable of a program and all that it starts: `OWNER.NUMBER`, the process that started it and which one it is."""

_PROCESSES = Path("/proc")
_MARKED = f"{MARK}=".encode()
_PAUSE_S = 0.05
_CLEAR_LOOKS = 3
"""So often in a row a keeper finds nothing: one that was being started carries its mark a moment later."""
_MOST_LOOKS = 1000


def marks() -> Iterator[tuple[int, str]]:
    """Every process of this user that carries a mark, and the mark. Raises `OSError` where nobody can look."""
    if not _PROCESSES.is_dir():
        return
    for entry in os.scandir(_PROCESSES):
        if entry.name.isdigit() and (mark := _mark_of(entry.name)):
            yield int(entry.name), mark


def kill_marked(owner: str, number: int | None = None) -> bool:
    """SIGKILL for what this process started, or for one program of it; whether there was any, or nobody could look."""
    found = False
    try:
        for pid, mark in marks():
            if _is_of(mark, owner, number) and _kill(pid, mark):
                found = True
    except OSError:  # no descriptor is free
        return True
    return found


def _is_of(mark: str, owner: str, number: int | None) -> bool:
    return mark == f"{owner}.{number}" if number is not None else mark.startswith(f"{owner}.")


def _mark_of(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:  # of another user, or gone
        return ""
    at = 0 if environment.startswith(_MARKED) else environment.find(b"\0" + _MARKED) + 1
    if not (at or environment.startswith(_MARKED)):
        return ""
    return environment[at + len(_MARKED) :].split(b"\0", 1)[0].decode(errors="replace")


def _kill(pid: int, mark: str) -> bool:
    """Whether it was that process still, and was there."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _mark_of(str(pid)) != mark:  # its number is another's by now
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(process)
    return True


def main(owner: str, folder: str) -> None:
    """Wait for the end of the process that started this one; then end its programs, and remove the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clear = 0
    for _ in range(_MOST_LOOKS):
        clear = 0 if kill_marked(owner) else clear + 1
        if clear == _CLEAR_LOOKS:
            break
        time.sleep(_PAUSE_S)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
