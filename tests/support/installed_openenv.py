"""OpenEnv itself, in an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def installed_openenv() -> str:
    """The Python that has it; the test is skipped where none has: `make .venv-openenv/.installed`."""
    path = os.environ.get("TAILRACE_OPENENV_PYTHON", str(Path(__file__).parents[2] / ".venv-openenv/bin/python"))
    if not Path(path).exists():
        pytest.skip("OpenEnv is not installed: make .venv-openenv/.installed")
    return path
