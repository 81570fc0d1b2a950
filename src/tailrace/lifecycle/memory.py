"""Allocator settings of a run's processes: nothing where `tailrace.cpu` is missing or switched off."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.lifecycle.trimming import Heap

try:
    from tailrace.cpu import memory

    _CAN_TUNE = True
except ImportError:
    _CAN_TUNE = False

RESERVED_BYTES_PER_ROLLOUT = 8192
"""Of the heap: a rollout in flight takes 5 to 6 KiB (columns of its branch, frames of its coroutines), a finished one
that waits for its batch nearly as much; the rest is headroom."""


def share_one_arena() -> None:
    """Keep the memory of an orchestrator in one piece. Call it before threads are started."""
    if _CAN_TUNE:
        memory.share_one_arena()


def reserve_memory(rollouts: int) -> None:
    """Have the memory of so many rollouts in flight at hand. Takes up to 0.5 s: call it before there is a loop."""
    if _CAN_TUNE:
        memory.reserve_memory(rollouts * RESERVED_BYTES_PER_ROLLOUT)


def heap_of_process() -> Heap | None:
    """What can give memory back."""
    return memory.glibc_heap() if _CAN_TUNE else None


def trainer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to change in the `environment` that a trainer's process is started with."""
    return memory.huge_pages(environment) if _CAN_TUNE else {}
