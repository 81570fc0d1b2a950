"""A signal to stop is heard from the command's first lines on, whatever it interrupts, and once is enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.run.runs import IMPORTS, PATIENCE_S, TINY, environment

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

Moment = Callable[[int, Path], bool]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def hears_signals(pid: int, folder: Path) -> bool:
    """Both handlers are there: the command's first lines."""
    caught = next(line for line in _proc(pid, "status").splitlines() if line.startswith("SigCgt"))
    mask = int(caught.split()[1], 16)
    return all(mask >> (number - 1) & 1 for number in CODES)


def imports(module: str) -> Moment:
    def moment(pid: int, folder: Path) -> bool:
        return module in _proc(pid, "maps")

    moment.__name__ = f"imports_{module}"
    return moment


def owns_its_folder(pid: int, folder: Path) -> bool:
    return (folder / "owner.json").exists()


def starts_its_roles(pid: int, folder: Path) -> bool:
    return (folder / "logs" / "trainer.log").exists()


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


MOMENTS = [hears_signals, imports("pydantic_core"), imports("tokenizers"), owns_its_folder, starts_its_roles]


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_one_signal_at_any_moment_of_the_start_ends_a_run_with_its_code(
    tmp_path: Path, moment: Moment, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace", "train", "quickstart", *TINY, *environment("words"), "--name", "run"],
        cwd=tmp_path,
        env={**os.environ, **IMPORTS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not moment(process.pid, tmp_path / "runs" / "run"):
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.002)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            printed, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == CODES[number], printed
            assert "Traceback" not in printed
            _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
            assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        finally:
            process.kill()


def test_the_name_of_a_run_that_was_stopped_before_its_first_step_is_free(tmp_path: Path) -> None:
    first = ["train", "quickstart", *TINY, *environment("words"), "--name", "run", "--max_steps", "1"]
    command = [sys.executable, "-m", "tailrace", *first]
    failing = [*command, "--trainer.loss.name", "math:pi"]
    for arguments, status in ((failing, 2), (command, 0), (command, 2)):
        done = subprocess.run(
            arguments, cwd=tmp_path, env={**os.environ, **IMPORTS}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
    assert "exists already" in done.stderr  # it has trained by now
    aside = tmp_path / "runs" / "run" / "superseded"
    assert [path.name for path in aside.iterdir()] == ["start_1"]
    assert (aside / "start_1" / "logs" / "trainer.log").is_file()
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()
