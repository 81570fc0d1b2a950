"""The process of a role: `python -m tailrace.lifecycle.child`, started by `spawn_role`.

Runs the role's coroutine to its end. SIGINT and SIGHUP are ignored (the parent decides); SIGTERM cancels the coroutine,
and so does the end of the parent, after which a thread kills this process and all it started by a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

import msgspec

from tailrace.lifecycle.event_loop import loop_factory
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
from tailrace.lifecycle.processes import Launch
from tailrace.lifecycle.roles import EntryFunction, Role, resolve_entry

_logger = logging.getLogger(__name__)


def main() -> int:
    """Run the role that standard input names; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe = _take_standard_input()
    launch = _read_launch(pipe)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.path[:] = launch.sys_path
    orphaned = threading.Event()
    threading.Thread(target=_watch_parent, args=(pipe, orphaned, launch.orphan_grace_s), daemon=True).start()
    status = _run_role(launch, pipe)
    logging.shutdown()
    if orphaned.is_set():
        _remove_leftovers()
        _kill_own_group()
    return status


def _run_role(launch: Launch, pipe: int) -> int:
    role = Role(launch.spec, launch.life, launch.address, lambda address: _say_ready(pipe, address))
    try:
        entry = resolve_entry(launch.spec.entry)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_terminated(entry, role))
    except asyncio.CancelledError:
        _logger.info("role %s was stopped", launch.spec.name)
        return ExitCode.TERMINATED
    except Exception as error:  # the log gets the traceback, and the parent shows its end
        _logger.exception("role %s failed", launch.spec.name)
        return exit_code_of(error)
    return ExitCode.FINISHED


def _say_ready(pipe: int, address: str) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone, which another thread notices
        os.write(pipe, f"{address}\n".encode())


async def _until_terminated(entry: EntryFunction, role: Role) -> None:
    """Waits for the role to end; SIGTERM cancels it."""
    task = asyncio.current_task()
    assert task is not None
    task.set_name(role.spec.name)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await entry(role)


def _take_standard_input() -> int:
    """Move the parent's socket to a descriptor that no child inherits, and leave standard input empty."""
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return pipe


def _read_launch(pipe: int) -> Launch:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(pipe, 65536)
        if not chunk:
            raise SystemExit(ExitCode.FAILED)
        line += chunk
    return msgspec.json.decode(line, type=Launch)


def _watch_parent(pipe: int, orphaned: threading.Event, grace_s: float) -> None:
    """Waits for the pipe's end of file, when the parent is gone; then SIGTERM, and SIGKILL after `grace_s`."""
    with contextlib.suppress(ConnectionResetError):  # the parent ended before it read that this is ready
        while os.read(pipe, 4096):
            pass
    orphaned.set()
    _logger.error("the parent process is gone; ending")
    _remove_leftovers()  # before it is too late: a role that is still starting ends by this signal
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s)
    _remove_leftovers()
    _kill_own_group()


def _remove_leftovers() -> None:
    """The parent's folders of shared memory and sockets: it cannot. The last of its children to leave removes all."""
    from tailrace.lifecycle.resources import remove_leftovers

    remove_leftovers()


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
