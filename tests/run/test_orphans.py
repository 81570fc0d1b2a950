"""An orchestrator that is killed can remove nothing: its children do, and nothing is left but the run's folder."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.run.runs import PATIENCE_S, ROLES, Command, command
from tests.support.descendants import still_run

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")


@pytest.mark.parametrize("moment", ["starting", "training"])
@pytest.mark.parametrize("roles", ROLES)
def test_what_a_killed_orchestrator_shared_goes_with_the_last_of_its_children(
    tmp_path: Path, moment: str, roles: tuple[str, ...]
) -> None:
    with command(tmp_path, *roles, "--max_steps", "10000", "--generator.replicas", "2") as run:
        if moment == "training":
            run.wait_for_steps(1)
        else:
            run.wait_until(lambda: _children_have_begun(run))
        assert len(run.leftovers()) >= 2  # of shared memory, and of sockets
        children = psutil.Process(run.pid).children(recursive=True)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert still_run(children, PATIENCE_S) == []
        assert run.leftovers() == []


def _children_have_begun(run: Command) -> bool:
    """Three of them listen for the end of their parent: they ignore what a terminal sends, which is their first act."""
    statuses = []
    for child in psutil.Process(run.pid).children():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            statuses.append(Path(f"/proc/{child.pid}/status").read_text(errors="replace"))
    ignoring = [line for text in statuses for line in text.splitlines() if line.startswith("SigIgn")]
    return sum(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1 for line in ignoring) >= 3
