from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import SettingsError
from tailrace.transport.channels import ipc_address
from tailrace.transport.owned_folders import (
    NodeFolder,
    own_payload_folder,
    own_shared_memory,
    own_socket_folder,
    remove_leftovers,
)

DIES_WITH_RESOURCES = """
import os, pathlib, sys
from tailrace.transport.owned_folders import own_shared_memory
folder = own_shared_memory("epoch", pathlib.Path(sys.argv[1]))
(folder.path / "batch").write_bytes(b"x")
print(folder.path, flush=True)
os._exit(9)
"""
DIES_WITH_MEMORY_OF_A_NODE = """
import os, pathlib, sys
from tailrace.transport import owned_folders
owned_folders.shared_memory_folder = lambda: pathlib.Path(sys.argv[1])
print(owned_folders.NodeFolder("epoch", "10.0.0.1").path, flush=True)
os._exit(9)
"""


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with own_shared_memory("epoch", tmp_path) as memory, own_socket_folder("epoch") as sockets:
        (memory.path / "batch").write_bytes(b"x")
        assert ipc_address(sockets.path, "events") == f"ipc://{sockets.path}/events"
        assert sockets.path.stat().st_mode & 0o777 == 0o700
    assert not sockets.path.exists()
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_dead_run_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES_WITH_RESOURCES, str(tmp_path)]
    dead = Path(subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip())
    assert (dead / "batch").exists()
    with own_shared_memory("epoch", tmp_path) as living:
        (tmp_path / "tailrace-run-without-a-lock").mkdir()
        assert remove_leftovers(tmp_path) == [dead]
        assert living.path.exists()
    remove_leftovers()


def test_memory_of_a_node_goes_with_the_last_of_its_owners_and_as_a_leftover_where_they_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.transport.owned_folders.shared_memory_folder", lambda: tmp_path)
    first, second = NodeFolder("epoch", "10.0.0.1"), NodeFolder("epoch", "10.0.0.1")
    (first.path / "weights").write_bytes(b"x")
    first.leave()
    first.leave()
    assert remove_leftovers(tmp_path) == []
    assert (second.path / "weights").exists()
    second.leave()
    assert not second.path.exists()

    command = [sys.executable, "-c", DIES_WITH_MEMORY_OF_A_NODE, str(tmp_path)]
    dead = Path(subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip())
    assert dead.exists()
    assert remove_leftovers(tmp_path) == [dead]


def test_a_folder_for_payloads_is_made_where_asked_for_and_goes_with_the_run(tmp_path: Path) -> None:
    parent = tmp_path / "runs" / "payloads"
    with own_payload_folder("epoch", parent) as payloads:
        assert payloads.path.parent == parent
        (payloads.path / "x.slab").write_bytes(b"x")
        assert remove_leftovers(parent) == []
    assert not list(parent.iterdir())


def test_folders_lie_where_they_were_asked_for_also_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with own_payload_folder("epoch", Path("runs/run")) as payloads:  # machines that join a run name it by another path
        assert payloads.path.is_relative_to("runs/run")


def test_a_folder_for_payloads_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(SettingsError, match=r"transport\.payload_folder"):
        own_payload_folder("epoch", file)


def test_a_folder_for_shared_memory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        own_shared_memory("epoch", tmp_path / "nowhere")


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    with own_socket_folder("epoch") as sockets, pytest.raises(SettingsError, match="XDG_RUNTIME_DIR"):
        ipc_address(sockets.path, "x" * 100)
