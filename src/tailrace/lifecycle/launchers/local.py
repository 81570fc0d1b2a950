"""Roles as processes of this machine.

Every role leads a process group of its own, so that a terminal's Ctrl-C reaches only the parent, and so that whatever a
role started ends with it. A role is reaped only after its group was killed: until then its number cannot be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import msgspec
import psutil
from typing_extensions import override

from tailrace.child_processes import call_on_exit, describe_exit, kill_group
from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError
from tailrace.lifecycle.heartbeats import Beat, LivenessWatch, Ready
from tailrace.lifecycle.launchers.base import Launcher, RoleHandle
from tailrace.lifecycle.processes import STACKS_S, STOP, spawn_role
from tailrace.lifecycle.roles import Role
from tailrace.tracing.stacks import STACKS
from tailrace.transport.channels import ipc_address
from tailrace.transport.owned_folders import own_socket_folder

_BEAT_EVERY_S = 0.5
_ORPHAN_S = 15.0
"""How long a role may take to end at most that nobody is there to kill any more."""
_MESSAGES: msgspec.json.Decoder[Beat | Ready] = msgspec.json.Decoder(Beat | Ready)
_TAIL_BYTES = 8192
_TAIL_LINES = 40
"""Four of its stacks are of threads that every role has."""


class LocalHandle(RoleHandle):
    """One role's process."""

    @override
    def _begin(self, role: Role) -> None:
        try:
            self._launcher.logs.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process, self._socket = spawn_role(
                    self.spec,
                    life=role.life,
                    address=role.address,
                    orphan_grace_s=min(self._launcher.settings.terminate_s, _ORPHAN_S),
                    output=log,
                    inherited=self._launcher.inherited,
                    beat_every_s=min(_BEAT_EVERY_S, self._launcher.restarts.silence_s / 4),
                )
        except OSError as error:
            self._has_left(1)
            raise LifecycleError(f"the {self.spec.name} cannot be started: {error}") from error
        self._lines = bytearray()
        self._killed_for = ""
        self._liveness_watch = LivenessWatch(self._launcher.restarts, self._end_hung, is_stopped=self._is_stopped)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._listen)
        call_on_exit(self._process, self._exited)

    @override
    def _terminate(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, or read nothing for long
            self._socket.send(STOP)
        self._signal(signal.SIGTERM)

    @override
    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    @property
    @override
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    @override
    def write_stacks(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACKS)

    @override
    def early_exit(self) -> LifecycleError:
        ended = f"left early, {describe_exit(self.status or 0)}"
        if self._killed_for:
            ended = f"was killed: {self._killed_for}"
        tail = f"the end of its log ({self._log_path}):\n{_tail(self._log_path)}"
        return LifecycleError(f"the {self.spec.name} {ended}; {tail}")

    @property
    def _log_path(self) -> Path:
        return self._launcher.logs / f"{self.spec.name}.log"

    def _signal(self, number: signal.Signals) -> None:
        """To the role and all that it started."""
        if self.is_running:
            kill_group(self.pid, number)

    def _listen(self) -> None:
        """Its lines say that it is ready, and that it lives."""
        try:
            received = self._socket.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        if not received:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._lines += received
        *lines, self._lines = self._lines.split(b"\n")
        for line in lines:
            match _MESSAGES.decode(line):
                case Ready(address=address):
                    self._was_ready(address)
                case Beat() as beat:
                    self._liveness_watch.take(beat)

    def _is_stopped(self) -> bool:
        """By SIGSTOP, or a debugger."""
        try:
            return psutil.Process(self.pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        except psutil.Error:
            return False

    def _end_hung(self, reason: str) -> None:
        """It does not move: kill it, once it wrote its stacks into its log, which one that is stopped cannot."""
        self._killed_for = reason
        self.write_stacks()
        hung = self._process
        asyncio.get_running_loop().call_later(STACKS_S, lambda: self._process is not hung or self._kill())

    def _exited(self) -> None:
        """The process has ended and is not reaped yet: kill the rest of its group."""
        self._liveness_watch.close()
        self._signal(signal.SIGKILL)
        self._listen()  # it may have said that it was ready a moment ago
        status = self._process.wait()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._has_left(status)


class LocalLauncher(Launcher):
    """A process for each role; they meet at sockets in a private folder."""

    handle_class = LocalHandle

    def __init__(self, epoch: str, logs: Path, settings: ShutdownSettings | None = None) -> None:
        super().__init__(epoch, logs, settings)
        self._sockets = own_socket_folder(epoch)

    @override
    def address(self, name: str) -> str:
        return ipc_address(self._sockets.path, name)

    @override
    def kill(self) -> None:
        super().kill()
        self._sockets.remove()


LAUNCHER = LocalLauncher


def _tail(log_path: Path) -> str:
    """The last lines that were written."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(lines[-_TAIL_LINES:]) or "(its log is empty)"
