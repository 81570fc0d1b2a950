"""What every process for users' code is started with, and what of it is not for what that code starts."""

from __future__ import annotations

import os
import sys

_USERS_PATH = "TAILRACE_USERS_PYTHONPATH"


def worker_environment() -> dict[str, str]:
    """Environment variables: this process's own and its modules, with one thread for numerics.

    The process calls `restore_python_path` as it begins.
    """
    modules = os.pathsep.join(filter(None, sys.path))
    users = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules, _USERS_PATH: users}


def restore_python_path() -> None:
    """Make `PYTHONPATH` the user's own again: a program of another interpreter must not find this one's modules."""
    del os.environ["PYTHONPATH"]
    if users := os.environ.pop(_USERS_PATH):
        os.environ["PYTHONPATH"] = users
