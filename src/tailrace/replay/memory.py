"""Memory of this very process, while something runs, and what a copy of memory takes here."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np
import psutil
from numpy.typing import NDArray

_POLL_S = 0.005
_COPIED_AT_ONCE = 64 << 20


class PeakMemory:
    """The highest resident size of this process while the context lasts, from a thread that looks every 5 ms."""

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = 0
        self._process = psutil.Process()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self.before_bytes = self.peak_bytes = self._process.memory_info().rss
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._stopping.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


def copy_s(num_bytes: int, *, repeats: int = 3) -> float:
    """Seconds that one copy of so many bytes takes here, from memory to memory that was used before: the best of some.

    >>> copy_s(1 << 20) > 0
    True
    """
    block = max(1, min(num_bytes, _COPIED_AT_ONCE))
    source, target = np.ones(block, np.uint8), np.zeros(block, np.uint8)
    best_s = min(_timed_copy(source, target) for _ in range(repeats))
    return best_s * num_bytes / block


def _timed_copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s
