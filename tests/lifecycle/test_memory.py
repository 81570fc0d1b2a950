from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from tailrace.lifecycle.memory import reserve_memory

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
