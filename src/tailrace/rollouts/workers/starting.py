"""What every process for users' code is started with."""

from __future__ import annotations

import os
import sys


def worker_environment() -> dict[str, str]:
    """Environment variables: this process's own and its modules, with one thread for numerics."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
