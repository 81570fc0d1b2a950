"""How the allocator of a trainer's process treats big tensors."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

_HUGE_PAGES = "glibc.malloc.hugetlb"

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


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """What to change in a trainer's `environment` so that glibc asks for huge pages; a user's own choice stands.

    Activations fill hundreds of megabytes; looked up in pages of 4 KB they cost a few percent of a step. Read by glibc
    (2.35 or later) when a process starts, and by nothing else.

    >>> huge_pages({})
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    {}
    """
    chosen = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES in chosen:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (chosen, f"{_HUGE_PAGES}=1")))}
