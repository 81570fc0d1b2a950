"""One program of one rollout: started in a process group of its own, watched, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.child_processes import call_on_exit, describe_exit, kill_group
from tailrace.environments.programs.host import ProgramHost, Taken
from tailrace.errors import ProgramFailed, SettingsError
from tailrace.timeouts import timeout

_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 16
"""Of the end of its output."""
_LAST_PIECES = 16
"""That are read of its output once it has ended: more than a pipe holds."""
_SHOWN_LINES = 20
_SHOWN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What one program may take; more ends it, and fails its rollout under the reason that is named here."""

    time_s: float | None = None
    """From its start: `program_timeout`. None: what is left of the rollout's time (`rollouts.timeout_s`)."""
    memory_bytes: int | None = None
    """Resident, of it and all that it started, looked at twice a second: `program_memory`. None: no limit."""
    output_bytes: int = 10_000_000
    """That it prints: `program_output`."""
    processes: int = 256
    """It and all that it started, looked at twice a second: `program_processes`."""

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_bytes", "output_bytes", "processes"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise SettingsError(f"ProgramLimits({name}={limit}): no program could keep to that; give more than 0")


class Program:
    """A process, from its start to its end. `close` it, whatever happened."""

    def __init__(
        self,
        host: ProgramHost,
        number: int,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        standard_input: Path | None,
        limits: ProgramLimits,
    ) -> None:
        """Start it in `folder`. Raises `ProgramFailed` where the system does not start it."""
        self._host, self._number, self._limits = host, number, limits
        self._name = shlex.join(command)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Future[None] | None = None
        self._printed_bytes, self._kept = 0, bytearray()
        try:
            with contextlib.ExitStack() as undoing:
                undoing.callback(host.ended, number)
                host.watch(number, self._look_at)
                self._output, its = os.pipe()
                undoing.callback(os.close, self._output)
                os.set_blocking(self._output, False)
                opened = os.devnull if standard_input is None else standard_input
                with os.fdopen(its, "wb") as printed, open(opened, "rb") as stdin:
                    self._process = subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**environment, **host.mark(number)},
                        stdin=stdin,
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                    )
                undoing.callback(self._process.wait)
                undoing.callback(kill_group, self._process.pid)
                self._loop.add_reader(self._output, self._read)
                undoing.callback(self._loop.remove_reader, self._output)
                call_on_exit(self._process, lambda: self._end_with(None))
                undoing.pop_all()
        except OSError as error:
            raise self._failed("program_not_started", f"could not be started: {error.strerror}") from error

    async def ended(self) -> int:
        """Wait until it has ended by itself; its status, negative for a signal, as in `subprocess`.

        What it started has ended then, too. Raises `ProgramFailed` where it took more than its limits.
        """
        try:
            async with timeout(self._limits.time_s):
                await self._ended
        except TimeoutError:
            raise self._failed("program_timeout", f"was ended after {self._limits.time_s:g} s") from None
        await self.close()
        assert self._process.returncode is not None  # it was reaped
        return self._process.returncode

    def ask_to_end(self) -> None:
        """Let it end by itself, in its own time."""
        if not self._ended.done():  # until then its number is no other's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    async def close(self) -> None:
        """End whatever is left of it. A second call only waits; one that is cancelled leaves the rest to go on."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._finish())
        await asyncio.shield(self._ending)

    async def _finish(self) -> None:
        try:
            await asyncio.to_thread(self._host.end, self._number, self._process)
        finally:
            self._loop.remove_reader(self._output)
            for _ in range(_LAST_PIECES):
                if not self._read():
                    break
            os.close(self._output)
            self._host.ended(self._number)
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # which nobody may have waited for
            self._ended.cancel()

    def failed_with(self, status: int) -> ProgramFailed:
        """That it ended with this status, in words."""
        return self._failed("program_exit", f"ended {describe_exit(status)}")

    def failed_silently(self) -> ProgramFailed:
        """That it ended, and the policy never answered it."""
        return self._failed("program_without_turn", "ended without a reply of the model")

    @property
    def output(self) -> str:
        """The end of what it printed."""
        return self._kept.decode(errors="replace")

    def _failed(self, reason: str, what: str) -> ProgramFailed:
        lines = self._kept[-_SHOWN_BYTES:].decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        printed = "\n".join(["; the end of its output:", *lines]) if lines else "; it printed nothing"
        return ProgramFailed(f"the program `{self._name}` {what}{printed}", reason=reason)

    def _end_with(self, failure: ProgramFailed | None) -> None:
        if self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def _look_at(self, taken: Taken) -> None:
        limits = self._limits
        if limits.memory_bytes is not None and taken.memory_bytes > limits.memory_bytes:
            what = f"took {taken.memory_bytes / 1e6:.0f} MB of memory, and may take {limits.memory_bytes / 1e6:.0f} MB"
            self._end_with(self._failed("program_memory", what))
        elif taken.processes > limits.processes:
            what = f"started {taken.processes} processes, and may have {limits.processes} at once"
            self._end_with(self._failed("program_processes", what))

    def _read(self) -> bool:
        """Whether there was something to read."""
        try:
            printed = os.read(self._output, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not printed:
            self._loop.remove_reader(self._output)
            return False
        self._printed_bytes += len(printed)
        self._kept += printed
        del self._kept[:-_KEPT_BYTES]
        if self._printed_bytes > self._limits.output_bytes:
            self._loop.remove_reader(self._output)  # it is ended, and need not be heard
            what = f"printed more than {self._limits.output_bytes / 1e6:g} MB"
            self._end_with(self._failed("program_output", what))
        return True
