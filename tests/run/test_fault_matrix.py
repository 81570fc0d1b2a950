"""The fault matrix: what becomes of a run one of whose processes is struck there, with scaled deadlines.

The roles have no model and never import torch (`light_roles`); processes, signals, sockets and files are real. Some
cells of each kind are tried each time, all of them with the long tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.run.runs import command
from tests.support.fault_cells import Cell, all_cells, run_cell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

# Whose process is killed in the middle of its work is tried by test_replicas, test_agent_workers, test_orphans and
# test_trainer_restarts each time.
QUICK = frozenset(
    {
        *("generator-startup-stopped", "generator-shutdown-hangs", "generator-transfer-leaves"),
        *("worker-startup-killed-always", "worker-transfer-paused"),
        *("trainer-save-stopped", "trainer-step-deaf", "trainer-startup-killed-always"),
        *("trainer-last_save-hangs", "trainer-step-exhausts", "trainer-step-paused"),
        *("trainer1-step-killed", "trainer1-transfer-stopped"),
        *("orchestrator-save-leaves", "orchestrator-step-hangs"),
        *("disk-step-fill_disk", "disk-step-fill_real_disk", "folder-startup-forbidden"),
        *(
            "memory-step-fill_shared_memory",
            "sockets-startup-delete_sockets",
            "segments-step-overwrite_segments_and_kill",
        ),
    }
)


def cells() -> list[object]:
    """Those that are not tried each time are long."""
    return [
        pytest.param(cell, id=cell.name, marks=() if cell.name in QUICK else pytest.mark.long) for cell in all_cells()
    ]


@pytest.mark.parametrize("cell", cells())
def test_a_run_ends_as_specified_whatever_is_struck_and_leaves_nothing(cell: Cell, tmp_path: Path) -> None:
    if cell.within.command() is None:
        pytest.skip(f"this system permits no {cell.within.value}")
    outcome = run_cell(cell, tmp_path)
    assert (outcome.wrong, outcome.leaks) == ([], []), outcome.wrong


def test_no_process_of_a_cell_imports_torch(tmp_path: Path) -> None:
    with command(tmp_path, *Cell("worker", "none", "step").overrides, "--trainer.ranks", "2") as run:
        run.wait_for_steps(1)
        pids = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
        mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert len(pids) >= 5  # two ranks, a generator, an agent worker
    assert not any("libtorch" in files for files in mapped)  # folders of tests have their names


def test_names_of_cells_are_unlike_and_the_quick_ones_exist() -> None:
    names = [cell.name for cell in all_cells()]
    assert len(names) == len(set(names))
    assert set(names) >= QUICK
    assert not [name for name in names if not re.fullmatch(r"[\w-]+", name)]
