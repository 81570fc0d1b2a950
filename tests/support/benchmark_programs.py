"""Programs of `benchmarks/` as modules."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """One of them, imported as where it is the program; the environment that it sets for itself is not kept."""
    environment = dict(os.environ)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        os.environ.clear()
        os.environ.update(environment)
