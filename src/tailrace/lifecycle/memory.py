"""Memory of a process whose event loop must not stand still.

A table that outgrows its place (a set of every rollout in flight, asyncio's own set of every task) moves to a new one
in one go. In pages that nobody has used yet that took 12 ms for 4 MB and 25 ms for 8 MB, in pages used before 1 and
2 ms. What takes so long is not the moving: each new page has to be found first, on a virtual machine by its host too.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAPPED_BYTES = 32 << 20
"""Blocks up to this size come from the heap; the most that every glibc takes."""
_KEEP_BYTES = (1 << 31) - 1
_BLOCK_BYTES = 16 << 20

RESERVED_BYTES_PER_ROLLOUT = 8192
"""Of the heap: one rollout in flight takes 5 to 6 KiB (columns of its branch, frames of its coroutines), a finished one
that waits for its batch nearly as much, and no table may find that they have used up all of what was reserved."""


def share_one_arena() -> bool:
    """Let all threads take memory from the same arena; whether it could (Linux with glibc only).

    glibc gives up to eight arenas per core to threads. What one thread takes and another gives back then lies about in
    all of them: an orchestrator whose steps were all alike grew by 1.0 % in 450 of them, with one arena by 0.1 %.
    Call it before threads are started: an arena that is there stays.
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))


def reserve_memory(num_bytes: int) -> bool:
    """Use so much of the heap once, and keep what is freed from now on; whether it could (Linux with glibc only).

    It stays with the process. Takes 0.1 to 0.5 s for 256 MiB, so call it before there is a loop to hold up.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    wishes = ((_M_MMAP_THRESHOLD, _MAPPED_BYTES), (_M_TRIM_THRESHOLD, _KEEP_BYTES))
    is_kept = all(bool(libc.mallopt(parameter, value)) for parameter, value in wishes)
    blocks = [libc.malloc(_BLOCK_BYTES) for _ in range(-(-num_bytes // _BLOCK_BYTES))]
    for block in filter(None, blocks):
        ctypes.memset(block, 0, _BLOCK_BYTES)
    for block in blocks:
        libc.free(block)
    return is_kept
