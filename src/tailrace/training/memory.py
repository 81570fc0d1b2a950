"""How this process's allocator treats big tensors."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let glibc reuse big freed blocks instead of giving them back; returns whether it does (Linux with glibc only).

    By default every activation above 32 MB is a fresh mapping, whose first write costs a page fault per 4 KB: on CPU up
    to ten times the computation itself. The price is that memory once used stays with the process. Call it before the
    thread that computes is started: a thread with an arena of its own gives that back piece by piece, whatever is set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wishes = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _KEEP_BYTES))
    return all(bool(mallopt(parameter, value)) for parameter, value in wishes)
