"""What runs on a GPU runs here on tensors that only know their shape and device, in a pytest that torch was told in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the stand-in for a GPU: make test-system")
def test_engine_and_trainer_keep_to_their_device() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.devices.stand_in", "tests/devices/cases.py"]
    run = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
