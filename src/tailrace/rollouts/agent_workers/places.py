"""Where an agent worker's processes are started, and what the orchestrator has of each, wherever it is."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import IO

import psutil
from typing_extensions import override

from tailrace.child_processes import kill_group
from tailrace.errors import CorruptData
from tailrace.rollouts.agent_workers.blame import MARK_BYTES
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.segments import BranchReader, Placed
from tailrace.rollouts.workers.starting import worker_environment
from tailrace.tracing.output_log import OutputLog
from tailrace.tracing.stacks import STACKS

KILLED_S = 4.0
"""Seconds in which a process that was killed is seen to have ended; one elsewhere is lost then, with its host."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process has ended."""

    status: int
    """A signal's number, negative, where one ended it."""
    exit_report: bytes = bytes(MARK_BYTES)
    """The mark of blame, and what `faulthandler` wrote."""
    lost_with: str = ""
    """What took it along, where its own end was not seen."""


class WorkerProcess(ABC):
    """A process that plays rollouts."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """While it runs, and is on this machine."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether its end was seen."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether it is there and does not run (SIGSTOP)."""

    @abstractmethod
    async def ended(self) -> ProcessEnd:
        """Wait for its end."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, with whatever users' code started in its group."""

    @abstractmethod
    def write_stacks(self) -> None:
        """Write where its threads stand and its tasks wait into its log, soon."""

    @abstractmethod
    def read_branches(self, placed: Placed) -> list[BranchData]:
        """What it left in shared memory. Raises `CorruptData` for anything but that."""

    @abstractmethod
    def close(self) -> None:
        """It has ended: let go of what only it wrote."""


class WorkerPlace(ABC):
    """Where the processes of one agent worker are started, one after another."""

    @abstractmethod
    async def start(self, protocol: asyncio.Protocol) -> WorkerProcess:
        """Start a process; what it sends goes to `protocol`, which is given a transport to it.

        Raises `LifecycleError` or `OSError` where that fails.
        """

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """No process is started here any more, and none runs."""


class LocalPlace(WorkerPlace):
    """Children of this process."""

    def __init__(self, output: OutputLog | None, *, shares_memory: bool = True) -> None:
        """`output` takes what they print; None: this process's own. Without shared memory branches go in messages."""
        self._output, self._shares_memory = output, shares_memory

    @override
    async def start(self, protocol: asyncio.Protocol) -> LocalProcess:
        """Over a pair of sockets, in a process group of its own."""
        ours, its = socket.socketpair()
        files = _Files(self._shares_memory)
        with its, nullcontext() if self._output is None else self._output.writer() as log:
            passed = (its.fileno(), *files.numbers)
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "tailrace.rollouts.agent_workers.process", *map(str, passed)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=passed,
                    env=worker_environment(),
                )
            except BaseException:
                transport.abort()
                files.close()
                raise
        return LocalProcess(process, files)


class LocalProcess(WorkerProcess):
    """A child of this process."""

    def __init__(self, process: asyncio.subprocess.Process, files: _Files) -> None:
        self._process, self._files = process, files

    @property
    @override
    def pid(self) -> int | None:
        return None if self.has_ended else self._process.pid

    @property
    @override
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    @override
    def is_stopped(self) -> bool:
        try:
            return self.pid is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    @override
    def write_stacks(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACKS)

    @override
    async def ended(self) -> ProcessEnd:
        status = await self._process.wait()
        return ProcessEnd(status, self._files.read_exit_report())

    @override
    def kill(self) -> None:
        kill_group(self._process.pid)

    @override
    def read_branches(self, placed: Placed) -> list[BranchData]:
        if self._files.branches is None:
            raise CorruptData("branches are said to lie in shared memory, and there is none")
        return self._files.branches.read(placed)

    @override
    def close(self) -> None:
        self._files.close()


class _Files:
    """What outlives a process that wrote it: its exit report, and finished branches."""

    def __init__(self, shares_memory: bool) -> None:
        self._exit_report: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in `close`
        self._exit_report.write(bytes(MARK_BYTES))
        self.branches = BranchReader() if shares_memory else None

    @property
    def numbers(self) -> Sequence[int]:
        """Descriptors, in the order in which the process takes them."""
        return [self._exit_report.fileno(), *([] if self.branches is None else self.branches.files)]

    def read_exit_report(self) -> bytes:
        """With the mark of blame before them."""
        self._exit_report.seek(0)
        return self._exit_report.read()

    def close(self) -> None:
        """Closing twice does nothing."""
        self._exit_report.close()
        if self.branches is not None:
            self.branches.close()
