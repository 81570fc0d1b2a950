"""Programs of `benchmarks/` as modules."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """One of them, imported as where it is the program; the environment that it sets for itself is not kept.

    Nor are the names of that folder, which are short: the next one imports its own.
    """
    environment, known = dict(os.environ), set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        os.environ.clear()
        os.environ.update(environment)
        for new in set(sys.modules) - known:
            if Path(getattr(sys.modules[new], "__file__", None) or "/").parent == BENCHMARKS:
                del sys.modules[new]
