"""Weights in files, for vLLM's workers that are processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tailrace.generation.engines.vllm.weights import SavedModelStateDict

DIES_AS_IT_LOADS = """
import os, pathlib, signal, sys, torch
from tailrace.generation.engines.vllm.weights import SavedModelStateDict
from tailrace.transport import owned_folders
owned_folders.shared_memory_folder = lambda: pathlib.Path(sys.argv[1])
saved = SavedModelStateDict({"head": torch.ones(2)}, None)
print(saved.folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_they_are_there_as_long_as_somebody_refers_to_them(tmp_path: Path) -> None:
    saved = SavedModelStateDict({"head": torch.ones(2)}, tmp_path)
    assert load_file(saved.folder.path / "model.safetensors")["head"].tolist() == [1, 1]
    del saved
    assert [*tmp_path.iterdir()] == []


def test_what_a_killed_generator_left_is_gone_before_the_next_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", DIES_AS_IT_LOADS, str(tmp_path)]
    left = Path(subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip())
    assert left.is_relative_to(tmp_path)
    assert (left / "model.safetensors").exists()
    monkeypatch.setattr("tailrace.transport.owned_folders.shared_memory_folder", lambda: tmp_path)
    first, second = (SavedModelStateDict({"head": torch.ones(2)}, None) for _ in range(2))
    assert {*tmp_path.iterdir()} == {first.folder.path, second.folder.path}
