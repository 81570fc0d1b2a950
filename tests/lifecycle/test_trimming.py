from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cpu.memory import glibc_heap
from tailrace.lifecycle.trimming import MemoryTrimmer, TrimPolicy

MEGABYTE = 1_000_000


class FakeHeap:
    def __init__(self, free_bytes: list[int]) -> None:
        self._free = iter(free_bytes)
        self.trimmed = 0
        self.takes_s = 0.0

    def free_bytes(self) -> int:
        return next(self._free)

    def give_back(self) -> int:
        self.trimmed += 1
        time.sleep(self.takes_s)
        return 7 * MEGABYTE


def at_once(job: Callable[[], None]) -> None:
    job()


@given(st.lists(st.integers(0, 1000)), st.integers(1, 1000), st.integers(1, 6))
def test_only_what_was_free_at_the_end_of_every_one_of_the_last_steps_is_given_back(
    free: list[int], threshold: int, patience: int
) -> None:
    policy = TrimPolicy(threshold, patience)
    last = 0
    for step, free_bytes in enumerate(free, 1):
        if policy.should_trim(free_bytes):
            assert step - last >= patience
            assert min(free[step - patience : step]) >= threshold
            last = step


def test_memory_that_every_step_uses_again_is_kept() -> None:
    heap = FakeHeap([900, 10, 900, 10, 900, 10] * 5 + [900])
    trimmer = MemoryTrimmer(100, at_once, heap)
    for _ in range(30):
        trimmer.step_ended()
    assert heap.trimmed == 0
    assert trimmer.step_ended() == {"memory/kept_bytes": 10.0}


def test_what_is_given_back_is_told_once() -> None:
    heap = FakeHeap([500] * 12)
    heap.takes_s = 0.02
    trimmer = MemoryTrimmer(100, at_once, heap)
    for _ in range(10):
        trimmer.step_ended()
    found = trimmer.step_ended()
    assert found["memory/given_back_bytes"] == 7 * MEGABYTE
    assert 0.02 <= found["memory/give_back_s"] < 10
    assert "memory/given_back_bytes" not in trimmer.step_ended()


def test_without_a_heap_nothing_is_ever_done() -> None:
    trimmer = MemoryTrimmer(0, at_once, None)
    assert trimmer.step_ended() == trimmer.step_ended() == {}


def test_freed_pieces_between_kept_ones_are_found_and_given_back() -> None:
    heap = glibc_heap()
    if heap is None:
        pytest.skip("needs glibc 2.33 or later")
    pieces = [np.ones(25_000, np.int32) for _ in range(600)]  # 100 kB each: from the heap, not mapped on their own
    before = heap.free_bytes()  # after they took what earlier tests had freed
    kept = pieces[::20]
    del pieces
    freed = heap.free_bytes() - before
    assert freed > 30 * MEGABYTE
    assert heap.give_back() > 20 * MEGABYTE
    assert len(kept) == 30
