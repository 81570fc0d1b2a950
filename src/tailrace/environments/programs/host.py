"""What the programs of one event loop share: a folder, a bound, a keeper, and a look at their memory now and then.

    hosted() ─► ProgramHost ─► slot ─► start a program ─► its mark ─► all its processes
                     └─► keeper: a process that outlives this one, and ends what this one leaves

A host lives as long as some rollout uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tailrace.child_processes import kill_group
from tailrace.environments.programs import marked

_LOOK_S = 0.5
"""Between two looks at what programs take."""
_END_S = 5.0
"""How long processes that were killed may take to be gone."""
_PAUSE_S = 0.005

Reading = Callable[["Taken"], None]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Taken:
    """What the processes of one program take now."""

    processes: int = 0
    memory_bytes: int = 0
    """Resident; what processes share counts for each."""


class ProgramHost:
    """Of one event loop. Get it by `hosted`."""

    def __init__(self) -> None:
        self.users = 0
        self._owner = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._folder = Path(tempfile.mkdtemp(prefix="tailrace-programs-"))
        self._slots: dict[object, asyncio.Semaphore] = {}
        self._watched: dict[str, Reading] = {}
        """By the text of a program's number, as marks have it."""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._looks: asyncio.Task[None] | None = None

    def slots(self, agent: object, concurrency: int) -> asyncio.Semaphore:
        """How many programs of one agent may run at once."""
        return self._slots.setdefault(agent, asyncio.Semaphore(concurrency))

    def new_number(self) -> int:
        """Of the next program."""
        return next(self._numbers)

    def folder(self, number: int) -> Path:
        """Of one program; nobody has made it yet."""
        return self._folder / str(number)

    def mark(self, number: int) -> dict[str, str]:
        """What a program has in its environment, so that it and all that it starts are found."""
        return {marked.MARK: f"{self._owner}.{number}"}

    def watch(self, number: int, reading: Reading) -> None:
        """Before a program is started: have it ended where this process is; tell `reading` what it takes."""
        if self._keeper is None or self._keeper.poll() is not None:
            self._keeper = _start_keeper(self._owner, self._folder)
        self._watched[str(number)] = reading
        if self._looks is None:
            self._looks = asyncio.create_task(self._look_again_and_again(), name="look at programs")

    def end(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Kill a program and all that it started, and reap it. Takes milliseconds: call it in a thread."""
        deadline_s = time.monotonic() + _END_S
        kill_group(process.pid)
        while marked.kill_marked(self._owner, number) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        process.wait()

    def ended(self, number: int) -> None:
        """It takes nothing any more."""
        self._watched.pop(str(number), None)

    def close(self) -> None:
        """No program is left."""
        if self._looks is not None:
            self._looks.cancel()
        if (keeper := self._keeper) is not None:
            keeper.kill()
            keeper.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _look_again_and_again(self) -> None:
        """Goes on where a look fails, for want of a descriptor or a thread, which is told of once."""
        has_failed = False
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                found = await asyncio.to_thread(self._look)
            except (OSError, RuntimeError) as error:
                if not has_failed:
                    _logger.warning("what programs take could not be looked at, which is tried again: %s", error)
                has_failed = True
                continue
            for number, taken in found.items():
                if (reading := self._watched.get(number)) is not None:
                    reading(taken)

    def _look(self) -> dict[str, Taken]:
        found: defaultdict[str, Taken] = defaultdict(Taken)
        for pid, mark in marked.marks():
            owner, _, number = mark.partition(".")
            if owner == self._owner:  # a program may have written its own, with anything for a number
                taken = found[number]
                taken.processes += 1
                with contextlib.suppress(psutil.Error):
                    taken.memory_bytes += psutil.Process(pid).memory_info().rss
        return found


def _start_keeper(owner: str, folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends this one's process group must leave it alone."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", marked.__file__, owner, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


_hosts: dict[asyncio.AbstractEventLoop, ProgramHost] = {}


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[ProgramHost]:
    """The host of the running event loop; the last to leave closes it."""
    loop = asyncio.get_running_loop()
    host = _hosts.get(loop)
    if host is None:
        host = _hosts[loop] = ProgramHost()
    host.users += 1
    try:
        yield host
    finally:
        host.users -= 1
        if not host.users:
            del _hosts[loop]
            host.close()
