"""glibc's allocator, tuned. Without Linux and glibc all of it does nothing.

New pages are slow, most of all on a virtual machine: moving a table that outgrew its place takes 12 ms for 4 MB in new
pages and 1 ms in used ones, and activations of a trainer on a CPU would meet new pages in every step.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from functools import cache

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAPPED_BYTES = 32 << 20
"""Blocks up to this size come from the heap; the most that every glibc takes."""
_KEEP_BYTES = (1 << 31) - 1
_BLOCK_BYTES = 16 << 20
_HUGE_PAGES = "glibc.malloc.hugetlb"
_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def share_one_arena() -> bool:
    """Let all threads take memory from the same arena; whether it could. Call it before threads are started.

    With an arena per thread, memory that one takes and another frees is scattered: in 450 like steps an orchestrator
    grew by 1.0 %, with one arena by 0.1 %.
    """
    return _set(_M_ARENA_MAX, 1)


def reserve_memory(num_bytes: int) -> bool:
    """Touch so much of the heap once, and keep freed memory from now on; whether it could.

    Takes 0.1 to 0.5 s for 256 MiB: call it before there is an event loop.
    """
    is_kept = _set(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and _set(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    if not is_kept:
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    blocks = [libc.malloc(_BLOCK_BYTES) for _ in range(-(-num_bytes // _BLOCK_BYTES))]
    for block in filter(None, blocks):
        ctypes.memset(block, 0, _BLOCK_BYTES)
    for block in blocks:
        libc.free(block)
    return True


def keep_freed_memory() -> bool:
    """Reuse big freed blocks instead of giving them back; whether it could. By default every activation above 32 MB is
    a fresh mapping.

    Call it before the computing thread is started: a thread's own arena gives memory back, whatever is set.
    """
    return _set(_M_ARENA_MAX, 1) and _set(_M_MMAP_THRESHOLD, 1 << 30) and _set(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """What to change in the `environment` of a process so that glibc asks for huge pages; a user's own choice stands.

    Worth a few percent of a trainer's step. Read by glibc 2.35 or later when a process starts.

    >>> huge_pages({})
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    {}
    """
    chosen = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES in chosen:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (chosen, f"{_HUGE_PAGES}=1")))}


@cache
def glibc_heap() -> GlibcHeap | None:
    """This process's, where it is glibc's 2.33 or later; None elsewhere."""
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return GlibcHeap(libc) if hasattr(libc, "mallinfo2") else None


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2`; see mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


class GlibcHeap:
    """The allocator of this process. `glibc_heap` finds it."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        libc.mallinfo2.restype = _HeapInfo
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
        self._libc, self._process = libc, psutil.Process()

    def free_bytes(self) -> int:
        """That it keeps, and nobody uses. Takes 0.1 ms for a thousand free pieces."""
        return int(self._libc.mallinfo2().fordblks)

    def give_back(self) -> int:
        """Bytes by which the process became smaller."""
        before = self._process.memory_info().rss
        self._libc.malloc_trim(0)
        return max(0, before - self._process.memory_info().rss)


def _set(parameter: int, value: int) -> bool:
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(parameter, value))
