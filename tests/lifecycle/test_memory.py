from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from tailrace.lifecycle.memory import reserve_memory

assert sys.argv[1] == "0" or reserve_memory(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    table = b"x" * (8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults_of_a_big_table(*, reserved: bool) -> int:
    command = [sys.executable, "-c", PROGRAM, str(int(reserved))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_table_that_grows_finds_its_pages_used_before() -> None:
    assert page_faults_of_a_big_table(reserved=False) > 8 * page_faults_of_a_big_table(reserved=True)
