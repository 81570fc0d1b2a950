"""Signs of life of a role's process: from a thread of its own, about its event loop and the threads that work for it.

    Pulse (role's process) ── Beat, every second or so ──► LivenessWatch (its parent) ── stopped, or stuck ──► killed

A process that is stopped sends nothing, and the system says that it is stopped. One whose loop does not turn, or whose
working thread neither computes nor ends, says so itself: a step that takes hours and computes is none of these.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tailrace.config.restarts import RestartSettings
from tailrace.generation.rpc.progress import ProgressDeadline

_IDLE_SHARE = 0.001
"""Of one core, below which a thread does not compute."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """One sign of life."""

    loop_s: float
    """Since the event loop turned."""
    work: str = ""
    """What has moved least recently of all that threads work at; empty where none works."""
    work_s: float = 0.0
    """Since its thread computed."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The role is ready, and listens there."""

    address: str


@dataclass(slots=True)
class _Work:
    what: str
    clock: int
    cpu_s: float
    moved_s: float


class Pulse:
    """Of this process. Safe across threads."""

    def __init__(self) -> None:
        self._loop_s = self._beat_s = time.monotonic()
        self._lock = threading.Lock()
        self._works: dict[int, _Work] = {}

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """The calling thread works at this, for as long as it takes, and computes while it does.

        Not watched where the system has no clock of a thread's own (macOS).
        """
        if not hasattr(time, "pthread_getcpuclockid"):
            yield
            return
        thread, now_s = threading.get_ident(), time.monotonic()
        clock = time.pthread_getcpuclockid(thread)
        with self._lock:
            self._works[thread] = _Work(what, clock, time.clock_gettime(clock), now_s)
        try:
            yield
        finally:
            with self._lock:
                del self._works[thread]

    async def beat_with_loop(self, every_s: float) -> None:
        """Turns with the event loop until cancelled."""
        while True:
            self._loop_s = time.monotonic()
            await asyncio.sleep(every_s)

    def beat(self) -> Beat:
        """Now."""
        now_s = time.monotonic()
        with self._lock:
            least_s = (now_s - self._beat_s) * _IDLE_SHARE
            self._beat_s = now_s
            for work in self._works.values():
                cpu_s = time.clock_gettime(work.clock)
                if cpu_s - work.cpu_s > least_s:
                    work.moved_s = now_s
                work.cpu_s = cpu_s
            slowest = min(self._works.values(), key=lambda work: work.moved_s, default=None)
        if slowest is None:
            return Beat(now_s - self._loop_s)
        return Beat(now_s - self._loop_s, slowest.what, now_s - slowest.moved_s)


def stuck_reason(beat: Beat, settings: RestartSettings) -> str | None:
    """Why a process that sends this has to be ended, for people; None where it need not be.

    >>> stuck_reason(Beat(0.1, "a step", 1900.0), RestartSettings())
    'its thread has not computed for 1900 s in a step (restarts.stuck_s)'
    >>> stuck_reason(Beat(0.1, "a step", 0.2), RestartSettings())
    """
    if beat.loop_s > settings.stuck_s:
        return f"its event loop has been held for {beat.loop_s:.0f} s (restarts.stuck_s)"
    if beat.work and beat.work_s > settings.stuck_s:
        return f"its thread has not computed for {beat.work_s:.0f} s in {beat.work} (restarts.stuck_s)"
    return None


class LivenessWatch:
    """Watches over one life of a role, and calls `on_dead` once, with the reason, when it has to be ended.

    Silence alone proves little: a library that is loaded holds the interpreter's lock, and the thread of signs of life
    waits for it. So the system is asked whether a silent process is stopped.
    """

    def __init__(
        self, settings: RestartSettings, on_dead: Callable[[str], None], *, is_stopped: Callable[[], bool]
    ) -> None:
        """On a running event loop."""
        self._settings, self._on_dead, self._is_stopped = settings, on_dead, is_stopped
        self._clock = asyncio.get_running_loop().time
        self._heard_s = self._clock()
        self._deadline = self._armed()

    def take(self, beat: Beat) -> None:
        """A sign of life came."""
        self._heard_s = self._clock()
        self._deadline.progress()
        if (reason := stuck_reason(beat, self._settings)) is not None:
            self._end(reason)

    def close(self) -> None:
        """The process has ended. Closing twice does nothing."""
        self._deadline.close()
        self._on_dead = lambda reason: None

    def _armed(self) -> ProgressDeadline:
        deadline = ProgressDeadline(self._settings.silence_s, self._ask)
        deadline.begin()
        return deadline

    def _ask(self) -> None:
        """It was silent for long: is it stopped, or silent for too long for anything else?"""
        silent_s = self._clock() - self._heard_s
        if self._is_stopped():
            self._end(f"it was stopped, and gave no sign of life for {silent_s:.0f} s (restarts.silence_s)")
        elif silent_s > self._settings.stuck_s:
            self._end(f"it gave no sign of life for {silent_s:.0f} s (restarts.stuck_s)")
        else:
            self._deadline = self._armed()

    def _end(self, reason: str) -> None:
        on_dead = self._on_dead
        self.close()
        on_dead(reason)
