"""A signal to stop is heard from the command's first lines on, whatever it interrupts, and once is enough."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tailrace.errors import DataError
from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tailrace.run.folder import open_run_folder, record_settings
from tests.run.runs import IMPORTS, PATIENCE_S, TINY, WITHOUT_MODEL, command, environment, run_inline, tiny_settings
from tests.support.descendants import still_run
from tests.support.faults import Fault
from tests.support.light_roles import REFUSAL
from tests.transport.test_owned_folders import DIES_WITH_RESOURCES

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

Moment = Callable[[int, Path], bool]
SOON_S = 60.0
"""Less than the deadline of a last save, and far more than such a run takes."""
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


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(
            *(moment, number),
            id=f"{moment.__name__}-{number.name}",
            # one handler hears both; roles that import torch take time, and those without a model hear the other one
            marks=pytest.mark.long if (moment, number) == (starts_its_roles, signal.SIGINT) else (),
        )
        for moment in MOMENTS
        for number in CODES
    ],
)
def test_one_signal_at_any_moment_of_the_start_ends_a_run_with_its_code(
    tmp_path: Path, moment: Moment, number: signal.Signals
) -> None:
    roles = WITHOUT_MODEL if (moment, number) == (starts_its_roles, signal.SIGTERM) else ()
    chosen = (*TINY, *environment("words"), *roles, "--name", "run")
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace", "train", "quickstart", *chosen],
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
            assert still_run(children, PATIENCE_S) == []
        finally:
            process.kill()


def test_a_start_that_fails_waits_for_no_trainer_that_loads_and_saves_nothing(tmp_path: Path) -> None:
    held = Fault(tmp_path / "fault", "trainer", "hangs", "trainer startup")
    held.folder.mkdir()
    refused = (*WITHOUT_MODEL, "--placement", "tests.support.light_roles:RefusingLauncher", "--max_steps", "1")
    with command(tmp_path, *refused, variables=held.variables) as run:
        printed, _ = run.process.communicate(timeout=SOON_S)
        assert (run.process.returncode, run.leftovers()) == (2, []), printed
        summary = read_summary(run.folder)
    assert summary is not None
    assert summary.status is RunStatus.FAILED
    assert re.match(rf"orchestrator: .*{REFUSAL}", summary.reason)
    assert not (run.folder / "checkpoints" / "step_000000").exists()
    assert not psutil.pid_exists(int(held.mark("reached-0").read_text()))


async def test_the_name_of_a_run_that_was_stopped_before_its_first_step_is_free(tmp_path: Path) -> None:
    with command(tmp_path, "--max_steps", "1", "--trainer.loss.name", "math:pi") as failing:
        status, printed = failing.wait()
        assert status == 2, printed
    assert (await run_inline(tmp_path / "runs", "--max_steps", "1")).exit_code == 0
    with pytest.raises(DataError, match="exists already"):  # it has trained by now
        await run_inline(tmp_path / "runs", "--max_steps", "1")
    aside = tmp_path / "runs" / "run" / "superseded"
    assert [path.name for path in aside.iterdir()] == ["start_1"]
    assert (aside / "start_1" / "logs" / "trainer.log").is_file()
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()


async def test_so_is_that_of_a_run_whose_last_save_was_of_the_initial_model(tmp_path: Path) -> None:
    barren = (
        "--scheduling.filter_zero_spread",
        "true",
        "--scheduling.max_barren_batches",
        "1",
        *environment("praising"),
    )
    ended = await run_inline(tmp_path, "--max_steps", "1", *barren)
    assert ended.steps == 0
    assert (tmp_path / "run" / "checkpoints" / "step_000000").is_dir()
    assert (await run_inline(tmp_path, "--max_steps", "1")).exit_code == 0
    assert (tmp_path / "run" / "superseded" / "start_1" / "checkpoints" / "step_000000").is_dir()


def test_so_is_that_of_a_run_after_which_a_start_was_refused(tmp_path: Path) -> None:
    """The refused start has set aside what the run left: nothing else is in the folder then."""
    settings = tiny_settings("--max_steps", "1")
    with open_run_folder(settings, tmp_path) as paths:
        record_settings(settings, paths, None)
    for _ in range(3):
        with open_run_folder(settings, tmp_path):
            pass
    assert [path.name for path in paths.superseded.iterdir()] == ["start_1"]


def test_weights_payloads_and_batches_of_a_run_that_was_killed_are_not_kept(tmp_path: Path) -> None:
    settings = tiny_settings("--max_steps", "1")
    with open_run_folder(settings, tmp_path) as paths:
        record_settings(settings, paths, None)
    subprocess.run([sys.executable, "-c", DIES_WITH_RESOURCES, str(paths.root)], check=False, stdout=subprocess.DEVNULL)
    assert [*paths.root.glob("*/batch")]
    paths.batches.mkdir()
    with open_run_folder(settings, tmp_path):
        kept = {path.name for path in (paths.superseded / "start_1").iterdir()}
        assert kept == {"config.toml"}
        assert {path.name for path in paths.root.iterdir()} == {"owner.json", "superseded"}


@pytest.mark.parametrize("name", ["tokenizer", "config.toml.part", "recipe.toml.part"])
def test_one_file_alone_is_what_a_start_left_that_was_refused_or_killed(tmp_path: Path, name: str) -> None:
    settings = tiny_settings("--max_steps", "1")
    (tmp_path / settings.name / name).mkdir(parents=True)
    with open_run_folder(settings, tmp_path) as paths:
        assert (paths.superseded / "start_1" / name).is_dir()


def test_a_notice_of_preemption_is_no_obstacle_and_stays_for_the_start_that_finds_it(tmp_path: Path) -> None:
    settings = tiny_settings("--max_steps", "1")
    notice = tmp_path / settings.name / "preempt"
    notice.parent.mkdir()
    notice.touch()
    with open_run_folder(settings, tmp_path) as paths:
        record_settings(settings, paths, None)
    with open_run_folder(settings, tmp_path) as paths:
        assert (paths.superseded / "start_1" / "config.toml").is_file()
    assert notice.is_file()


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path) -> None:
    settings = tiny_settings("--max_steps", "1")
    (tmp_path / settings.name / "superseded" / "start_1").mkdir(parents=True)
    (tmp_path / settings.name / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="exists already"), open_run_folder(settings, tmp_path):
        pass
