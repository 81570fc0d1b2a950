"""How late the event loop runs: a 10 Hz heartbeat, and the stack of what holds the loop for too long."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np

from tailrace.tracing.phases import PhaseRecorder

_logger = logging.getLogger(__name__)

_MAX_BEATS = 6_000
"""Heartbeats kept between two flushes: ten minutes at 10 Hz; the maximum is exact beyond that too."""
_DRAWN_S = 0.001
"""Lags below are not worth a point in the trace."""


@dataclass(frozen=True, slots=True)
class LagStatistics:
    """Lag since the last flush: how much later than asked the loop resumed a sleeping task, in seconds."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    stalls: int = 0
    """Times the loop was held for longer than `stall_s`; each one's stack is in the log."""
    held_max_s: float = 0.0
    """The longest of them without what the loop's thread waited for a core that others had."""

    def metrics(self) -> dict[str, float]:
        """By name, for the accumulator."""
        return {
            "lag/p50_s": self.p50_s,
            "lag/p90_s": self.p90_s,
            "lag/p99_s": self.p99_s,
            "lag/max_s": self.max_s,
            "lag/held_max_s": self.held_max_s,
        }


class CoreWait:
    """How long the thread that makes this stands ready without a core to run on. Linux tells; elsewhere it is 0."""

    def __init__(self, path: Path = Path("/proc/thread-self/schedstat")) -> None:
        self._file: FileIO | None = None
        with suppress(OSError):
            self._file = FileIO(path)
        self._before_s = self._total_s()

    def since_s(self) -> float:
        """Since the last time it was asked."""
        before_s, self._before_s = self._before_s, self._total_s()
        return max(0.0, self._before_s - before_s)

    def close(self) -> None:
        """From then on it is 0."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _total_s(self) -> float:
        if self._file is None:
            return 0.0
        self._file.seek(0)
        return int(self._file.read(64).split()[1]) / 1e9


class LoopLagMonitor:
    """Measures the lag of the running loop, once. `async with LoopLagMonitor() as lag: ... lag.flush()`.

    A thread beside the loop watches the heartbeat, because a held loop can't report on itself: it logs the stack of the
    loop's thread while the stall lasts, so that the log names the function. With `phases` (recorded on the same loop)
    warnings name the phase as well, and stalls are in the trace.
    """

    def __init__(self, interval_s: float = 0.1, *, stall_s: float = 1.0, phases: PhaseRecorder | None = None) -> None:
        self._interval_s = interval_s
        self._stall_s = stall_s
        self._phases = phases
        self._held_ns: dict[str, int] = {}
        """By phase, up to the last heartbeat."""
        self._lags: deque[float] = deque(maxlen=_MAX_BEATS)
        self._max_s = self._held_max_s = 0.0
        self._stalls = 0
        self._last_beat_s = self._drawn_s = 0.0
        self._loop_thread_id = 0
        self._stopping = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._watchdog = threading.Thread(target=self._watch, name="loop-lag-watchdog", daemon=True)

    async def __aenter__(self) -> LoopLagMonitor:
        self._loop_thread_id = threading.get_ident()
        self._last_beat_s = time.monotonic()
        self._watchdog.start()
        self._task = asyncio.create_task(self._beat(), name="loop-lag-monitor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was measured stays readable."""
        self._stopping.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._watchdog.join(timeout=1.0)

    def snapshot(self) -> LagStatistics:
        """Statistics since the last flush, the delay of the heartbeat that is due right now included."""
        lags = [*self._lags, self._overdue_s()]
        p50, p90, p99 = np.percentile(lags, (50, 90, 99)).tolist()
        return LagStatistics(p50, p90, p99, max(self._max_s, lags[-1]), self._stalls, self._held_max_s)

    def flush(self) -> LagStatistics:
        """`snapshot()`, then start over: call it once per step."""
        statistics = self.snapshot()
        self._lags.clear()
        self._max_s = self._held_max_s = 0.0
        self._stalls = 0
        return statistics

    def _overdue_s(self) -> float:
        if self._task is None:
            return 0.0
        return max(0.0, time.monotonic() - self._last_beat_s - self._interval_s)

    async def _beat(self) -> None:
        with closing(CoreWait()) as core_wait:
            while True:
                await asyncio.sleep(self._interval_s)
                lag_s = self._overdue_s()
                self._held_max_s = max(self._held_max_s, lag_s - core_wait.since_s())
                self._last_beat_s = time.monotonic()
                self._lags.append(lag_s)
                self._max_s = max(self._max_s, lag_s)
                blamed = self._blame(lag_s)
                if lag_s > self._stall_s:
                    self._stalls += 1
                    _logger.warning("the event loop was held for %.1f s%s", lag_s, blamed)
                self._draw(lag_s, blamed)

    def _blame(self, lag_s: float) -> str:
        """Which phase held the loop most since the last heartbeat, for people: at most the lag, which began later."""
        if self._phases is None:
            return ""
        before, self._held_ns = self._held_ns, self._phases.held_ns()
        held_s = {name: (held_ns - before.get(name, 0)) / 1e9 for name, held_ns in self._held_ns.items()}
        worst = max(held_s, key=held_s.__getitem__, default=None)
        return "" if worst is None else f", {min(held_s[worst], lag_s):.1f} s of it in phase {worst!r}"

    def _draw(self, lag_s: float, blamed: str) -> None:
        """In the trace: a curve of the lag, and a span for each stall."""
        trace = None if self._phases is None else self._phases.trace
        if trace is None:
            return
        now_ns, lag_ns = time.monotonic_ns(), int(lag_s * 1e9)
        if max(lag_s, self._drawn_s) > _DRAWN_S:
            trace.add_value("event-loop lag", "ms", now_ns, lag_s * 1e3)
            self._drawn_s = lag_s
        if lag_s > self._stall_s:
            trace.add_span("stall" + blamed, "event loop", 0, began_ns=now_ns - lag_ns, duration_ns=lag_ns)

    def _watch(self) -> None:
        reported_beat_s = -1.0
        while not self._stopping.wait(min(self._interval_s, self._stall_s) * 2):
            beat_s = self._last_beat_s
            if beat_s != reported_beat_s and self._overdue_s() > self._stall_s:
                reported_beat_s = beat_s
                self._log_stack()

    def _log_stack(self) -> None:
        frame = sys._current_frames().get(self._loop_thread_id)
        if frame is None:
            return
        stack = "".join(traceback.format_stack(frame))
        phase = "" if self._phases is None else f" in phase {self._phases.in_force!r}"
        _logger.warning("the event loop has been held for over %.1f s%s, by:\n%s", self._stall_s, phase, stack)
