"""Gives back memory that glibc keeps for a process which has long stopped using it.

After large batches were freed, gigabytes may stay resident. `malloc_trim` gives them back, but holds the allocator's
lock meanwhile, 0.15 s per GB, in any thread. So it is called only for what was free after each of the last ten steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

PATIENCE_STEPS = 10


class Heap(Protocol):
    """The allocator of this process."""

    def free_bytes(self) -> int:
        """Kept from the system, and unused."""
        ...

    def give_back(self) -> int:
        """Return what is free to the system; by how many bytes the process shrank."""
        ...


@dataclass(slots=True)
class TrimPolicy:
    """Trims what has been free at the end of every one of the last steps.

    >>> policy = TrimPolicy(threshold_bytes=100, patience=3)
    >>> [policy.should_trim(free_bytes) for free_bytes in (500, 50, 500, 400, 300, 300)]
    [False, False, False, False, True, False]
    """

    threshold_bytes: int
    patience: int = PATIENCE_STEPS
    _free: deque[int] = field(default_factory=deque)

    def should_trim(self, free_bytes: int) -> bool:
        """Whether to, with so much free at the end of a step. After yes it starts to count again."""
        self._free.append(free_bytes)
        if len(self._free) > self.patience:
            self._free.popleft()
        if len(self._free) < self.patience or min(self._free) < self.threshold_bytes:
            return False
        self._free.clear()
        return True


class MemoryTrimmer:
    """Checks the heap after each step, in a thread, and gives back what was free for long."""

    def __init__(self, threshold_bytes: int, run_in_thread: Callable[[Callable[[], None]], object], heap: Heap | None):
        """`run_in_thread` runs one job after the other. Without a heap, nothing is ever done."""
        self._policy, self._run, self._heap = TrimPolicy(threshold_bytes), run_in_thread, heap
        self._metrics: dict[str, float] = {}

    def step_ended(self) -> dict[str, float]:
        """Start a check; never waits. Metrics of the check before."""
        found, self._metrics = self._metrics, {}
        if self._heap is not None:
            self._run(self._look)
        return found

    def _look(self) -> None:
        assert self._heap is not None
        free_bytes = self._heap.free_bytes()
        found = {"memory/kept_bytes": float(free_bytes)}
        if self._policy.should_trim(free_bytes):
            started_s = time.perf_counter()
            given_back = self._heap.give_back()
            found["memory/given_back_bytes"] = float(given_back)
            found["memory/give_back_s"] = time.perf_counter() - started_s
        self._metrics = found
