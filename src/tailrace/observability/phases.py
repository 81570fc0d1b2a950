"""Where a step's time goes: named phases, in wall and CPU seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """One phase since the last flush."""

    wall_s: float
    cpu_s: float
    """Of the thread that opened the phase; what other tasks of its loop used meanwhile counts too."""
    count: int
    """How often it ran."""


class PhaseTimer:
    """Adds up the time of named phases. Phases may overlap and nest, in tasks and in threads: each counts in full.

    >>> timer = PhaseTimer()
    >>> with timer.phase("score"):
    ...     pass
    >>> totals = timer.flush()
    >>> totals["score"].count, timer.flush()
    (1, {})
    """

    def __init__(self) -> None:
        self._totals: dict[str, PhaseTotals] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block under `name`, also when it raises."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.add(name, wall_s=time.perf_counter() - wall_s, cpu_s=time.thread_time() - cpu_s)

    def add(self, name: str, *, wall_s: float, cpu_s: float = 0.0) -> None:
        """Count a duration that was measured elsewhere."""
        with self._lock:
            old = self._totals.get(name, PhaseTotals(0.0, 0.0, 0))
            self._totals[name] = PhaseTotals(old.wall_s + wall_s, old.cpu_s + cpu_s, old.count + 1)

    def flush(self) -> dict[str, PhaseTotals]:
        """Totals by name since the last flush; starts over. A phase still open counts where it ends."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return totals

    def flush_metrics(self) -> dict[str, float]:
        """`flush()` as metrics: `phase/{name}_s` and `phase/{name}_cpu_s`."""
        totals = self.flush()
        wall = {f"phase/{name}_s": phase.wall_s for name, phase in totals.items()}
        return wall | {f"phase/{name}_cpu_s": phase.cpu_s for name, phase in totals.items()}
