from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from tailrace.cpu.memory import reserve_memory

assert reserve_memory(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    table = b"x" * (8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_table_that_grows_finds_its_pages_used_before() -> None:
    pages_of_both = 2 * (8 << 20) // resource.getpagesize()
    command = [sys.executable, "-c", PROGRAM]
    faults = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert faults < pages_of_both / 8


ARENAS = """
import ctypes, sys, threading
from tailrace.cpu.memory import share_one_arena

assert sys.argv[1] == "0" or share_one_arena()
barrier = threading.Barrier(4)

def take():
    kept = [bytes(5_000) for _ in range(100)]
    barrier.wait()

threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def arenas_of_four_threads(*, shared: bool) -> int:
    command = [sys.executable, "-c", ARENAS, str(int(shared))]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return told.count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_threads_share_one_arena_where_asked_to() -> None:
    assert arenas_of_four_threads(shared=False) > 1
    assert arenas_of_four_threads(shared=True) == 1
