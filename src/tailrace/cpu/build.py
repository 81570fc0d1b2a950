"""Compiles `kernels.cpp` for this processor, once, into the user's cache folder.

The compiler is `$CXX`, or the first of `c++`, `g++` and `clang++`. The library is named after a digest of source, flags
and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tailrace.cache_folder import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-std=c++17")
_OUTPUT_FLAGS = ("-fPIC", "-shared")
_DEADLINE_S = 120.0
_CPU_LINES = ("vendor_id", "model name", "flags", "Features")

_log = logging.getLogger(__name__)


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, and a line in the log that says why, where they cannot be compiled or loaded."""
    compiler = find_compiler()
    if compiler is None:
        _log.info("no C++ compiler found: torch's own operations are used, which take more time")
        return None
    try:
        return ctypes.CDLL(str(compiled(compiler, cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("native kernels cannot be built, torch's own operations are used: %s", reason)
        return None


def find_compiler() -> str | None:
    """Path of the C++ compiler."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compiled(compiler: str, folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there yet. Two processes may compile at once: the last one wins.

    Raises `OSError` or `subprocess.SubprocessError`.
    """
    digest = hashlib.sha256("\n".join((SOURCE.read_text(), *FLAGS, compiler, _processor())).encode()).hexdigest()
    library = folder / f"kernels-{digest[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / library.name
            command = [compiler, *FLAGS, *_OUTPUT_FLAGS, "-o", str(fresh), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DEADLINE_S)
            fresh.replace(library)
    return library


def _processor() -> str:
    """What `-march=native` depends on."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    first = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), platform.processor(), *(first.get(name, "") for name in _CPU_LINES)])
