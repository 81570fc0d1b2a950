"""Starts the processes of a run, tells at once when one leaves early, and stops them in order.

Every role leads a process group of its own, so that a terminal's Ctrl-C reaches only the parent, and so that whatever a
role started ends with it. A role is reaped only after its group was killed: until then its number cannot be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tailrace.errors import LifecycleError
from tailrace.lifecycle.exit_codes import describe_exit
from tailrace.lifecycle.roles import Launch, RoleSpec, child_environment
from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.transport.channels import wait_until

_logger = logging.getLogger(__name__)

_TAIL_BYTES = 8192
_TAIL_LINES = 30


class RoleProcess:
    """One role's process. Its supervisor makes it, on a running event loop."""

    def __init__(
        self,
        role: RoleSpec,
        log_path: Path,
        orphan_grace_s: float,
        on_exit: Callable[[], None],
        *,
        is_replaceable: bool = False,
    ) -> None:
        self.name = role.name
        self.log_path = log_path
        self.returncode: int | None = None
        """Its exit status once it left; a signal's number, negative, when one killed it."""
        self.is_done = False
        """Its work is over: it may leave, with status 0."""
        self.is_stopping = False
        """It was told to leave."""
        self.is_replaceable = is_replaceable
        """Whoever started it looks after it: its early end fails nothing by itself."""
        self._on_exit = on_exit
        self._process = _spawn(role, log_path, orphan_grace_s)
        _call_on_exit(self._process, self._left)

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not left yet."""
        return self.returncode is None

    @property
    def has_failed(self) -> bool:
        """Whether it left before it was told to, or badly."""
        return self.returncode is not None and not self.is_stopping and not (self.is_done and self.returncode == 0)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the role and all that it started. Does nothing once it left."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error.strerror})"
        return "\n".join(lines[-_TAIL_LINES:]) or "(its log is empty)"

    def early_exit(self) -> LifecycleError:
        """What to raise when it left before it was told to."""
        return LifecycleError(
            f"the {self.name} left early, {describe_exit(self.returncode or 0)}; "
            f"the end of its log ({self.log_path}):\n{self.log_tail()}"
        )

    def _left(self) -> None:
        """The process has ended and is not reaped yet: take the rest of its group with it."""
        self.signal_group(signal.SIGKILL)
        self.returncode = self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._on_exit()


class Supervisor:
    """Owns the processes of a run. Use it as an async context manager: none of them outlives it."""

    def __init__(self, log_folder: Path, settings: ShutdownSettings | None = None) -> None:
        self._log_folder = log_folder
        self._settings = settings or ShutdownSettings()
        self._roles: dict[str, RoleProcess] = {}
        self._changed = asyncio.Event()

    def start(self, role: RoleSpec, *, is_replaceable: bool = False) -> RoleProcess:
        """Start a role's process; again, once it left. Raises `LifecycleError` when it runs or cannot be started.

        `watch` does not report the early end of one that is replaceable.
        """
        if role.name in self._roles and self._roles[role.name].is_running:
            raise LifecycleError(f"a role named {role.name} runs already")
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log_path = self._log_folder / f"{role.name}.log"
        process = RoleProcess(
            role, log_path, self._settings.terminate_s, self._changed.set, is_replaceable=is_replaceable
        )
        self._roles[role.name] = process
        self._changed.set()
        return process

    def expect_exit(self, name: str) -> None:
        """The role's work is done: from now on it may leave, with status 0."""
        self._roles[name].is_done = True
        self._changed.set()

    async def watch(self) -> None:
        """Wait for a role that leaves before it was told to, and raise its `LifecycleError`. Returns never."""
        await wait_until(self._changed, lambda: any(self._failed()))
        raise self._failed()[0].early_exit()

    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run, by name."""
        return {name: role.pid for name, role in self._roles.items() if role.is_running}

    async def wait(self, name: str) -> int:
        """Wait for a role to leave, for as long as it takes; returns its exit status."""
        role = self._roles[name]
        await wait_until(self._changed, lambda: not role.is_running)
        return role.returncode or 0

    async def stop(self, *names: str) -> None:
        """Stop these roles, one after the other: SIGTERM, a deadline, SIGKILL, each to the whole process group.

        Raises `LifecycleError` for a process that even SIGKILL does not end by the deadline (a hung disk, a driver).
        """
        for name in names:
            await self._stop(self._roles[name])

    async def kill_role(self, name: str) -> None:
        """End a role that cannot be asked to end (it is stuck), and wait for that; does nothing once it left.

        Raises `LifecycleError` when even SIGKILL does not end it by the deadline.
        """
        role = self._roles[name]
        role.is_stopping = True
        role.signal_group(signal.SIGKILL)
        try:
            async with asyncio.timeout(self._settings.terminate_s):
                await self.wait(name)
        except TimeoutError:
            raise _unkillable(role) from None

    async def close(self) -> None:
        """Stop every role that still runs, the last one started first. Closing twice does nothing."""
        await self.stop(*reversed(self._roles))

    def kill(self) -> None:
        """End every role at once, without waiting: for a second Ctrl-C."""
        for role in self._roles.values():
            role.is_stopping = True
            role.signal_group(signal.SIGKILL)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            self.kill()

    def _failed(self) -> list[RoleProcess]:
        return [role for role in self._roles.values() if role.has_failed and not role.is_replaceable]

    async def _stop(self, role: RoleProcess) -> None:
        role.is_stopping = True
        deadline_s = self._settings.terminate_s
        for number in (signal.SIGTERM, signal.SIGKILL):
            role.signal_group(number)
            try:
                async with asyncio.timeout(deadline_s):
                    await self.wait(role.name)
                    return
            except TimeoutError:
                _logger.warning("the %s did not end within %g s of %s", role.name, deadline_s, number.name)
        raise _unkillable(role)


def _unkillable(role: RoleProcess) -> LifecycleError:
    return LifecycleError(f"the {role.name} (process {role.pid}) cannot be killed: the system holds it")


def _spawn(role: RoleSpec, log_path: Path, orphan_grace_s: float) -> subprocess.Popen[bytes]:
    launch = Launch(role.name, role.function, role.settings, [path for path in sys.path if path], orphan_grace_s)
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.lifecycle.child"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=child_environment(role),
                process_group=0,
                bufsize=0,
            )
    except OSError as error:
        raise LifecycleError(f"the {role.name} cannot be started: {error}") from error
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it ended already; whoever watches it hears of that
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
    return process


def _call_on_exit(process: subprocess.Popen[bytes], callback: Callable[[], None]) -> None:
    """Call back on the event loop once the process has ended, leaving it to be reaped by the callback."""
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
