"""Roles that the launchers' tests start. They import next to nothing, so that they start at once."""

# ruff: noqa: ASYNC220  nothing else runs on their loops

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tailrace.errors import SettingsError
from tailrace.lifecycle.roles import Role
from tailrace.reporting.logs import setup_logging
from tailrace.tracing.log_files import LogFile


async def leave(role: Role) -> None:
    print("leaving early")


async def fail(role: Role) -> None:
    raise RuntimeError("the wheel fell off")


async def leave_slowly(role: Role) -> None:
    """With a thread that the interpreter would wait for, as it would for torch's modules to be taken apart."""
    threading.Thread(target=threading.Event().wait).start()
    print("all is done")


async def refuse_settings(role: Role) -> None:
    raise SettingsError("a setting is wrong")


async def wait_for_stop(role: Role) -> None:
    """Says that it runs by making a file, and that it ended in order by another."""
    folder = Path(role.spec.settings.decode())
    (folder / "running").write_text(str(os.getpid()))
    role.ready()
    try:
        await asyncio.Event().wait()
    finally:
        (folder / "cleaned up").touch()


async def tell_file_limit(role: Role) -> None:
    print("open files:", *resource.getrlimit(resource.RLIMIT_NOFILE))


async def print_much(role: Role) -> None:
    """And log nothing."""
    folder = Path(role.spec.settings.decode())
    setup_logging(role.spec.name, folder / "logs", max_bytes=10_000)
    os.write(1, b"printed by native code\n" * 5_000)
    (folder / "running").write_text(str(os.getpid()))
    await asyncio.Event().wait()


async def hang_in_its_log(role: Role) -> None:
    """As a disk elsewhere may: whoever looks at the size of the file waits for ever."""
    folder = Path(role.spec.settings.decode())
    setup_logging(role.spec.name, folder / "logs")

    def hang(file: LogFile) -> None:
        (folder / "running").write_text(str(os.getpid()))
        threading.Event().wait()

    LogFile.keep_within_size = hang  # type: ignore[method-assign]
    await asyncio.Event().wait()


async def write_whole_environment(role: Role) -> None:
    Path(role.spec.settings.decode(), "environment").write_text(json.dumps(dict(os.environ)))
    role.ready()


async def crash_when_stopped(role: Role) -> None:
    """As native code does."""
    (Path(role.spec.settings.decode()) / "running").write_text(str(os.getpid()))
    try:
        await asyncio.Event().wait()
    finally:
        os.kill(os.getpid(), signal.SIGSEGV)


async def ignore_terminate(role: Role) -> None:
    """Whoever asks, and however."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(role.spec.settings.decode(), "running").write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def hold_its_loop(role: Role) -> None:
    """In a call that does not compute, for ever."""
    Path(role.spec.settings.decode(), "running").write_text(str(os.getpid()))
    await asyncio.sleep(0.1)
    threading.Event().wait()


async def hold_the_interpreter(role: Role) -> None:
    """As a library may that is loaded: no thread runs meanwhile."""
    folder = Path(role.spec.settings.decode())
    (folder / "running").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(3)
    (folder / "done").write_text("done")
    await asyncio.Event().wait()


async def work_in_a_thread(role: Role) -> None:
    """Computes until a file asks it to get stuck in it."""
    folder = Path(role.spec.settings.decode())

    def work() -> None:
        with role.working("a long step"):
            (folder / "running").write_text(str(os.getpid()))
            while not (folder / "get stuck").exists():
                sum(range(100_000))
            threading.Event().wait()

    await asyncio.to_thread(work)


async def start_grandchild(role: Role) -> None:
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    Path(role.spec.settings.decode(), "grandchild").write_text(str(grandchild.pid))
    Path(role.spec.settings.decode(), "running").write_text(str(os.getpid()))
    await asyncio.Event().wait()


async def write_environment(role: Role) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "COLOUR", "CUDA_VISIBLE_DEVICES")
    lines = [os.environ[name] for name in names]
    lines += [str(os.getpgrp() == os.getpid()), str("torch" in sys.modules), repr(sys.stdin.read())]
    Path(role.spec.settings.decode()).write_text("\n".join(lines))


async def describe_itself(role: Role) -> None:
    """Says what it was given, then where it listens, and leaves when a file asks for it."""
    folder, spec = Path(role.spec.settings.decode()), role.spec
    (folder / role.instance).write_text(f"{spec.name} {spec.devices} {spec.environment['COLOUR']} {role.address}")
    role.ready(f"tcp://there:{role.life}")
    while not (folder / "leave").exists():  # noqa: ASYNC110 - another process has no event here
        await asyncio.sleep(0.01)


def wait_for_file(path: Path, deadline_s: float = 60.0) -> str:
    """The content of a file that another process makes."""
    end_s = time.monotonic() + deadline_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end_s, f"{path} never came"
        time.sleep(0.01)
    return path.read_text()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
