"""A fault in a process of a run: who is struck, by what, and where the run is then.

The roles of `light_roles` say where they are (`passing`), and wait there until they are let go on. Who tests strikes
the victim meanwhile (`Striker`), by a signal from outside; what a process can do only to itself it does on `STRIKE`.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from tests.support.fault_resources import DAMAGES, Ground

FAULT = "TAILRACE_TEST_FAULT"
STRIKE = signal.SIGURG
"""A process that may be struck does then to itself what its fault says. Nobody has another use for it."""
PATIENCE_S = 240.0
PAUSE_S = 1.0
NOTICED_S = 0.3
"""Between two signals, so that both are heard."""
_LOOK_S = 0.005
_SPARE_BYTES = 64 << 20


class Fault(NamedTuple):
    """What happens to whom, and where."""

    folder: Path
    """For marks."""
    victim: str
    """A role, `worker` or `orchestrator`."""
    blow: str
    """killed, stopped (for good), paused (stopped for a moment), leaves (with status 0), deaf (it ends for nobody),
    hangs (its main thread), exhausts (its memory, as its limit has it), or what is damaged (`fault_resources`)."""
    place: str
    """Of whichever process comes there: its role, a point, and what it does."""
    times: int = 1

    @property
    def variables(self) -> Mapping[str, str]:
        """Of the environment; they also mark every process of the run."""
        return {FAULT: "|".join(map(str, self))}

    @classmethod
    def asked_for(cls) -> Fault | None:
        """In this process."""
        if not (text := os.environ.get(FAULT)):
            return None
        folder, victim, blow, place, times = text.split("|")
        return cls(Path(folder), victim, blow, place, int(times))

    def mark(self, what: str) -> Path:
        """A file that tells another process something by being there."""
        return self.folder / what

    def place_mark(self, what: str, text: str) -> None:
        """Whole, or not at all."""
        part = self.mark(f".{what}.{os.getpid()}")
        part.write_text(text)
        part.rename(self.mark(what))


def stands_ready(role: str) -> None:
    """This process plays this role, and may be struck from now on. In its main thread."""
    fault = Fault.asked_for()
    if fault is None or fault.victim != role:
        return
    if fault.blow in ("leaves", "deaf", "hangs"):
        signal.signal(STRIKE, lambda *_: _do_to_itself(fault))
    fault.place_mark("victim", str(os.getpid()))


def passing(place: str) -> None:
    """The run is here: where the fault is to happen, wait until it has."""
    fault = Fault.asked_for()
    if fault is None or fault.place != place:
        return
    number = len(list(fault.folder.glob("reached-*")))
    if number >= fault.times:
        return
    fault.place_mark(f"reached-{number}", str(os.getpid()))
    deadline_s = time.monotonic() + PATIENCE_S
    while not fault.mark(f"struck-{number}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(_LOOK_S)
    if fault.blow == "exhausts" and fault.mark("victim").read_text() == str(os.getpid()):
        _exhaust_memory()


def is_deaf() -> bool:
    """Whether this process is to go on when it is asked to end."""
    return _deaf.is_set()


_deaf = threading.Event()


def _do_to_itself(fault: Fault) -> None:
    """In the main thread."""
    if fault.blow == "leaves":
        os._exit(0)
    if fault.victim != "orchestrator" or fault.blow == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _deaf.set()
    while fault.blow == "hangs":
        signal.pause()


def _exhaust_memory() -> None:
    """Ask for more than this process may have. Raises `MemoryError`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE_BYTES, most))
    bytearray(2 * _SPARE_BYTES)


class Striker:
    """Strikes the victim whenever the run is at the place. A context manager; it works in a thread."""

    def __init__(self, fault: Fault) -> None:
        self.struck_s: list[float] = []
        """When, by the monotonic clock."""
        self._fault, self._is_over = fault, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _work(self) -> None:
        for number in range(self._fault.times):
            while not self._fault.mark(f"reached-{number}").exists():
                if self._is_over.wait(_LOOK_S):
                    return
            with suppress(ProcessLookupError):
                self._strike(int(self._fault.mark("victim").read_text()), number)
            self._fault.place_mark(f"struck-{number}", "")

    def _strike(self, pid: int, number: int) -> None:
        fault = self._fault
        self.struck_s.append(time.monotonic())
        if (damage := DAMAGES.get(fault.blow)) is not None:
            damage(Ground(fault.folder.parent / "runs" / "run", pid, int(fault.mark(f"reached-{number}").read_text())))
        elif fault.blow == "killed":
            os.kill(pid, signal.SIGKILL)
        elif fault.blow in ("stopped", "paused"):
            os.kill(pid, signal.SIGSTOP)
        elif fault.blow != "exhausts":
            os.kill(pid, STRIKE)
        if fault.blow in ("killed", "leaves"):
            _wait_for_end(pid)
        if fault.blow == "deaf":
            time.sleep(NOTICED_S)
            os.kill(pid, signal.SIGTERM)
        if fault.blow == "paused":
            fault.place_mark(f"struck-{number}", "")  # whoever waits for it goes on, itself when it is continued
            time.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)


def _wait_for_end(pid: int) -> None:
    """Of a process whose parent may leave it unread for a while."""
    deadline_s = time.monotonic() + PATIENCE_S
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s
            time.sleep(_LOOK_S)
