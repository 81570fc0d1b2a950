"""One compute thread per test process, set before anything loads OpenMP, whose every copy reads it once.

Two workers with two threads each on two cores wait for each other; and vLLM's kernels refuse to run in a thread that
counts other threads than the one that planned them.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import sys
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest
from hypothesis import settings as _hypothesis

from tailrace.reporting import logs
from tests.support.skips import hides_a_loss

# Who starts the tests under nohup has it ignored, which processes inherit and a run respects.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# Where a machine forbids bytecode, each of the thousand processes that tests start would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Who is started with these is one of several processes, or asks a proxy for what is on this very machine.
_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
for _name in [*os.environ]:
    if _name in _RANK or _name.startswith(("SLURM_", "TORCHELASTIC_")) or _name.lower().endswith("_proxy"):
        del os.environ[_name]

# No test asks a model hub: without a network each question is asked again for 23 s.
os.environ["HF_HUB_OFFLINE"] = "1"

# Else Ray takes another address than the loopback for this machine's. It reads this at its first import: maybe by vLLM.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# A busy machine makes no property wrong, and the same code passes or fails alike each time it is tested. `make explore`
# then tries examples that nobody has tried yet, for a minute, all of them drawn from the seed that it prints.
_hypothesis.register_profile("explore", deadline=None, derandomize=False, database=None)
_hypothesis.register_profile("same", deadline=None, derandomize=True)
_hypothesis.load_profile("same")


_ends_s = pytest.StashKey[float]()
_made = frozenset(os.environ.get("TAILRACE_MADE", "").split())
"""Targets of the Makefile: no test may be skipped for want of what they install."""
_Report = TypeVar("_Report", pytest.CollectReport, pytest.TestReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--explore-s", type=float, help="shuffle the tests by the seed, begin none after so many seconds")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports of all modules make millions of objects that stay: nothing is looked for among them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seconds := config.getoption("--explore-s")) is not None:
        random.Random(config.getoption("--hypothesis-seed")).shuffle(items)
        config.stash[_ends_s] = time.monotonic() + seconds


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(_ends_s, math.inf):
        pytest.skip("the time to explore is over")
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_where_it_hides_a_loss((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_where_it_hides_a_loss((yield))


def _failed_where_it_hides_a_loss(report: _Report) -> _Report:
    if report.skipped and isinstance(report.longrepr, tuple) and hides_a_loss(report.longrepr[2], _made):
        report.outcome, report.longrepr = "failed", f"{report.longrepr[2]} (which was made)"
    return report


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands and runs set up the logging of their process; a test gives it back."""
    with logs.logging_as_it_was():
        yield
