"""The process of a role: `python -m tailrace.lifecycle.child`, started by `spawn_role`.

Runs the role's coroutine to its end. Signals that ask for an end are the parent's to answer, since terminals and
cluster schedulers send them to every process; what cancels the coroutine is the parent's wish, or its end, after which
a thread kills this process and all it started by a deadline. Another thread sends signs of life, and a third bounds the
log: its disk may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tailrace.lifecycle.event_loop import loop_factory
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
from tailrace.lifecycle.heartbeats import Beat, Pulse, Ready
from tailrace.lifecycle.open_files import raise_file_limit
from tailrace.lifecycle.processes import Launch
from tailrace.lifecycle.roles import EntryFunction, Role, resolve_entry
from tailrace.reporting.logs import keep_log_within_size
from tailrace.tracing.log_files import log_to_stderr
from tailrace.tracing.stacks import STACKS

_logger = logging.getLogger(__name__)

_PARENT = os.getppid()
"""Until it has ended."""

_END_TOLD_S = 0.2
"""From the first to the last of what tells that the parent ended."""
_ENDS_S, _LOOK_S = 2.0, 0.01
"""How long a parent that ended may still hold its locks, and how often that is looked at."""
_IDLE_BEAT_S = 1.0
"""Between two turns of the loop where nobody hears of them."""
_REMOVING = threading.Lock()


def main() -> int:
    """Run the role that standard input names; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # not ignored: what this starts would inherit that
        signal.signal(number, lambda *_: None)
    faulthandler.enable()  # a crash in native code tells its Python stack in the role's log
    faulthandler.register(STACKS)
    raise_file_limit()  # who started this may be a cluster's process, which has not
    parent = _Parent(_take_standard_input())
    launch = parent.read_launch()
    log_to_stderr()
    sys.path[:] = launch.sys_path
    stop, pulse = _Stop(), Pulse()
    threading.Thread(target=parent.watch, args=(stop, launch.orphan_grace_s), daemon=True).start()
    if launch.beat_every_s:
        threading.Thread(target=parent.tell_beats, args=(pulse, launch.beat_every_s), daemon=True).start()
        threading.Thread(target=parent.bound_log, args=(launch.beat_every_s,), daemon=True).start()
    status = _run_role(launch, parent, stop, pulse)
    logging.shutdown()
    was_stopped = _is_stopped(_PARENT)
    while _is_stopped(_PARENT):  # if it is killed before it goes on, nobody else removes what it leaves
        time.sleep(_LOOK_S)
    is_in_doubt = was_stopped or status == ExitCode.FAILED  # its sockets may end before it is missed
    if parent.is_gone.wait(_END_TOLD_S if is_in_doubt else 0):
        _remove_leftovers()
        _kill_own_group()
    return status


def _run_role(launch: Launch, parent: _Parent, stop: _Stop, pulse: Pulse) -> int:
    role = Role(launch.spec, launch.life, launch.address, lambda at: parent.tell(Ready(at)), pulse.working)
    try:
        entry = resolve_entry(launch.spec.entry)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_stopped(entry, role, stop, pulse.beat_with_loop(launch.beat_every_s or _IDLE_BEAT_S)))
    except asyncio.CancelledError:
        _logger.info("role %s was stopped", launch.spec.name)
        return ExitCode.TERMINATED
    except Exception as error:  # the log gets the traceback, and the parent shows its end
        _logger.exception("role %s failed", launch.spec.name)
        return exit_code_of(error)
    return ExitCode.FINISHED


async def _until_stopped(entry: EntryFunction, role: Role, stop: _Stop, beats: Coroutine[Any, Any, None]) -> None:
    """Waits for the role to end; a wish to stop cancels it."""
    task = asyncio.current_task()
    assert task is not None
    task.set_name(role.spec.name)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _leave_to_parent, stop)
    stop.cancels(task)
    beating = asyncio.create_task(beats, name="heartbeats")
    try:
        await entry(role)
    finally:
        beating.cancel()


def _leave_to_parent(stop: _Stop) -> None:
    if not stop.is_wanted:
        _logger.warning("SIGTERM is left to the process that started this one; SIGKILL ends this one alone")


class _Stop:
    """A wish to stop, from any thread, before or after there is something to cancel."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._task: asyncio.Task[None] | None = None

    def cancels(self, task: asyncio.Task[None]) -> None:
        """Called by the task itself."""
        self._task = task
        if self.is_wanted:
            task.cancel()

    def request(self) -> None:
        """Stop."""
        self.is_wanted = True
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the task
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class _Parent:
    """The parent's socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket, self._lock = socket.socket(fileno=descriptor), threading.Lock()
        self.is_gone = threading.Event()

    def read_launch(self) -> Launch:
        """Its first line."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self._socket.recv(65536, socket.MSG_PEEK)
            if not byte:
                raise SystemExit(ExitCode.FAILED)
            line += self._socket.recv(byte.find(b"\n") + 1 or len(byte))
        return msgspec.json.decode(line, type=Launch)

    def watch(self, stop: _Stop, grace_s: float) -> None:
        """Waits for its wish to stop, and for the end of file, when it is gone; SIGKILL `grace_s` after that."""
        with contextlib.suppress(ConnectionResetError):  # the parent ended before it read what this told
            while self._socket.recv(4096):  # it only ever says STOP
                stop.request()
        self.is_gone.set()
        _logger.error("the parent process is gone; ending")
        stop.request()
        _remove_leftovers()
        threading.Event().wait(grace_s)
        _remove_leftovers()
        _kill_own_group()

    def tell(self, message: Ready | Beat) -> None:
        """One line. A parent that is gone is noticed by another thread."""
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def tell_beats(self, pulse: Pulse, every_s: float) -> None:
        """Until the process ends. A parent that reads nothing holds this thread alone."""
        while not self.is_gone.wait(every_s):
            self.tell(pulse.beat())

    def bound_log(self, every_s: float) -> None:
        """Until the process ends. A disk that hangs holds this thread alone."""
        while not self.is_gone.wait(every_s):
            keep_log_within_size()


def _take_standard_input() -> int:
    """Move the parent's socket to a descriptor that no child inherits, and leave standard input empty."""
    parent = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return parent


def _remove_leftovers() -> None:
    """The parent's folders of shared memory and sockets, once it holds them no more: it cannot.

    The last of its children to leave removes all. One thread at a time: a second one would take the folder that the
    first has locked for one in use, and end the process before the first is done.
    """
    from tailrace.transport.owned_folders import remove_leftovers

    with _REMOVING:
        deadline_s = time.monotonic() + _ENDS_S
        while os.getppid() == _PARENT and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        remove_leftovers()


def _is_stopped(pid: int) -> bool:
    """By a signal. False where processes cannot be looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith(("T", "t"))
    except OSError:
        return False


def _kill_own_group() -> None:
    """This process and all that it started; only itself where it leads no group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(status: int) -> NoReturn:
    """End at once: what the role held is closed, and to take torch's modules apart needs a second of computing time.

    On a busy machine that made the parent give a role up that had done all of its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
