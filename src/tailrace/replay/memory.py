"""Peak memory of this process while something runs, and the time of a memory copy on this machine."""

from __future__ import annotations

import threading
import timeit

import numpy as np
import psutil

_POLL_S = 0.005
_COPIED_AT_ONCE = 64 << 20


class PeakMemory:
    """Highest resident size of this process while the context lasts, sampled every 5 ms by a thread; for one use."""

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = 0
        self._process = psutil.Process()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self.before_bytes = self.peak_bytes = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


def copy_s(num_bytes: int) -> float:
    """Seconds to copy so many bytes between buffers that were touched before: the best of three."""
    block = max(1, min(num_bytes, _COPIED_AT_ONCE))
    source, target = np.ones(block, np.uint8), np.zeros(block, np.uint8)
    return min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=3)) * num_bytes / block
