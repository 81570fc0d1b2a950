"""How this process's allocator treats big tensors."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let glibc reuse big freed blocks instead of giving them back; returns whether it does (Linux with glibc only).

    By default every activation above 32 MB is a fresh mapping, whose first write costs a page fault per 4 KB: on CPU up
    to ten times the computation itself. The price is that memory once used stays with the process.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
