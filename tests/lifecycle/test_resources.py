from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import SettingsError
from tailrace.lifecycle.resources import RunResources, SocketFolder, remove_leftovers

DIES_WITH_RESOURCES = """
import os, pathlib, sys
from tailrace.lifecycle.resources import RunResources
resources = RunResources("epoch", shared_memory_parent=pathlib.Path(sys.argv[1]))
(resources.shared_memory / "batch").write_bytes(b"x")
print(resources.shared_memory, flush=True)
os._exit(9)
"""


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with RunResources("epoch", shared_memory_parent=tmp_path) as resources, SocketFolder("epoch") as sockets:
        (resources.shared_memory / "batch").write_bytes(b"x")
        assert sockets.address("events") == f"ipc://{sockets.path}/events"
        assert sockets.path.stat().st_mode & 0o777 == 0o700
    assert not sockets.path.exists()
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_dead_run_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES_WITH_RESOURCES, str(tmp_path)]
    dead = Path(subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip())
    assert (dead / "batch").exists()
    with RunResources("epoch", shared_memory_parent=tmp_path) as living:
        (tmp_path / "tailrace-run-without-a-lock").mkdir()
        assert remove_leftovers(tmp_path) == [dead]
        assert living.shared_memory.exists()
    remove_leftovers()


def test_a_folder_for_payloads_is_made_where_asked_for_and_goes_with_the_run(tmp_path: Path) -> None:
    memory, parent = tmp_path / "memory", tmp_path / "runs" / "payloads"
    memory.mkdir()
    with RunResources("epoch", shared_memory_parent=memory, payload_parent=parent) as resources:
        assert resources.payloads.parent == parent
        (resources.payloads / "x.slab").write_bytes(b"x")
        assert remove_leftovers(parent) == []
    assert not list(parent.iterdir())


def test_a_folder_for_payloads_that_cannot_be_used_is_named_and_nothing_stays(tmp_path: Path) -> None:
    memory, file = tmp_path / "memory", tmp_path / "file"
    memory.mkdir()
    file.write_bytes(b"")
    with pytest.raises(SettingsError, match=r"transport\.payload_folder"):
        RunResources("epoch", shared_memory_parent=memory, payload_parent=file)
    assert not list(memory.iterdir())


def test_a_folder_for_shared_memory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        RunResources("epoch", shared_memory_parent=tmp_path / "nowhere")


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    with SocketFolder("epoch") as sockets, pytest.raises(SettingsError, match="XDG_RUNTIME_DIR"):
        sockets.address("x" * 100)
