"""Processes that this one started: when they end, and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable


def call_on_exit(process: subprocess.Popen[bytes], callback: Callable[[], None]) -> None:
    """Call back on the event loop once the process has ended, leaving it to be reaped by the callback.

    Until then its number, which may be that of a process group, cannot be another's.
    """
    loop = asyncio.get_running_loop()
    if not hasattr(os, "pidfd_open"):
        threading.Thread(target=lambda: (process.wait(), loop.call_soon_threadsafe(callback)), daemon=True).start()
        return
    pidfd = os.pidfd_open(process.pid)

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        callback()

    loop.add_reader(pidfd, ended)


def kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads, whatever is left of it: one that has ended is no error.

    Where only its unreaped leader is left, some systems say that it may not be signalled.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def describe_exit(returncode: int) -> str:
    """An exit status in words; a negative one is a signal's, as in `subprocess`.

    >>> describe_exit(0), describe_exit(-9)
    ('with status 0', 'killed by SIGKILL')
    """
    return f"with status {returncode}" if returncode >= 0 else f"killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """A signal's name, where it has one: most of the real-time ones have none.

    >>> signal_name(9), signal_name(37)
    ('SIGKILL', 'signal 37')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
