"""`tailrace serve` as a process, alone or once per rank under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.run.runs import IMPORTS, PATIENCE_S

SMALL = ("--generator.slots", "8", "--generator.max_cache_tokens", "512", "--generator.router.report_every_s", "0.1")
ALONE = (str(Path(sys.executable).with_name("tailrace")),)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "tailrace"),
)


@contextmanager
def serving(
    *arguments: str, model: str = "bundled:quickstart", launcher: tuple[str, ...] = ALONE
) -> Iterator[subprocess.Popen[str]]:
    """`tailrace serve` as a process, which is gone afterwards with all that it started."""
    process = subprocess.Popen(
        [*launcher, "serve", model, *SMALL, *arguments],
        env={**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where it says that it listens."""
    return _said(process, r"is served at (\S+);")


def http_address_of(process: subprocess.Popen[str]) -> str:
    """Where it says that it answers HTTP clients."""
    return _said(process, r"HTTP clients are answered at (\S+)")


def _said(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(what, line):
            return found[1]
    raise AssertionError("it ended before it served:\n" + "".join(said))


def refusal(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what was printed, in one line."""
    printed, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, " ".join(printed.split())


def require_refused(status: int, printed: str, *, served: str, own: str) -> None:
    """A run with the model `own` was told that a generator serves one of another architecture."""
    said = " ".join(printed.split())
    told = f"serves {served}, another model than model.name = {own} (num_hidden_layers is 3 there and 1 here)"
    assert (status, told in said) == (2, True), printed


def rank_of(process: subprocess.Popen[str], number: int) -> psutil.Process:
    """The process of a rank that it, or torchrun, started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a compiler that is done, say
            if child.environ().get("RANK") == str(number):
                return child
    raise AssertionError(f"no rank {number} runs")
