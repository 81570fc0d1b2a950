from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from role_functions import is_alive, wait_for_file

from tailrace.config.restarts import RestartSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.launchers.local import LocalHandle, LocalLauncher
from tailrace.lifecycle.roles import RoleSpec

PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[LocalLauncher]:
    async with LocalLauncher("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=PATIENCE_S)) as launcher:
        yield launcher


def role(function: str, settings: object = "", name: str = "trainer") -> RoleSpec:
    settings = str(settings).encode()
    entry, environment = f"role_functions:{function}", {"COLOUR": "blue"}
    return RoleSpec(name, entry, settings, devices=("2", "GPU-8"), environment=environment)


async def start_and_wait(launcher: LocalLauncher, function: str, folder: Path, name: str = "trainer") -> LocalHandle:
    process = launcher.start(role(function, folder, name))
    assert isinstance(process, LocalHandle)
    await asyncio.to_thread(wait_for_file, folder / "running")
    return process


@asynccontextmanager
async def hasty_launcher(
    folder: Path, *, silence_s: float = PATIENCE_S, stuck_s: float = PATIENCE_S
) -> AsyncIterator[LocalLauncher]:
    """With such deadlines for signs of life."""
    async with LocalLauncher("epoch", folder / "logs") as launcher:
        launcher.restarts = RestartSettings(silence_s=silence_s, stuck_s=stuck_s)
        yield launcher


def is_left_alone(process: LocalHandle, launcher: LocalLauncher) -> bool:
    """Nor is it asked where its threads stand, as one that is about to be killed."""
    return process.is_running and "(most recent call first)" not in (launcher.logs / "trainer.log").read_text()


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):  # noqa: ASYNC110 - another process's child has no event here
            await asyncio.sleep(0.01)


async def test_a_role_that_leaves_early_is_a_failure_even_with_status_0(launcher: LocalLauncher) -> None:
    launcher.start(role("leave"))
    with pytest.raises(LifecycleError, match=r"(?s)the trainer left early, with status 0.*leaving early"):
        await launcher.watch()


async def test_a_role_may_open_as_many_files_as_the_system_allows_whoever_starts_it(launcher: LocalLauncher) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        launcher.start(role("tell_file_limit"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(LifecycleError, match=f"open files: {hard} {hard}"):
        await launcher.watch()


async def test_a_role_that_crashes_where_it_is_asked_to_end_is_named_and_its_log_says_where(
    launcher: LocalLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crashing = await start_and_wait(launcher, "crash_when_stopped", tmp_path)
    await crashing.stop()
    assert "the trainer left when it was asked to, killed by SIGSEGV" in caplog.text
    assert "crash_when_stopped" in (tmp_path / "logs" / "trainer.log").read_text()


async def test_a_replaceable_role_fails_nothing_when_it_is_killed_and_can_be_started_again(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    first = launcher.start(role("wait_for_stop", tmp_path), is_replaceable=True)
    await asyncio.to_thread(wait_for_file, tmp_path / "running")
    os.kill(first.pid, signal.SIGSTOP)
    await first.kill()
    assert first.status == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await launcher.watch()
    killed = first.pid
    await first.restart()
    assert launcher.pids() == {"trainer": first.pid}
    assert first.pid != killed


async def test_the_error_of_a_role_that_raised_shows_the_end_of_its_log(launcher: LocalLauncher) -> None:
    launcher.start(role("fail"))
    with pytest.raises(LifecycleError, match=r"(?s)with status 1.*RuntimeError: the wheel fell off"):
        await launcher.watch()


async def test_a_role_that_refuses_its_settings_says_so_in_its_exit_status(launcher: LocalLauncher) -> None:
    assert await launcher.start(role("refuse_settings")).left() == ExitCode.BAD_SETTINGS


async def test_a_function_that_does_not_exist_is_named(launcher: LocalLauncher) -> None:
    launcher.start(role("no_such_function"))
    with pytest.raises(LifecycleError, match=r"(?s)with status 2.*no_such_function"):
        await launcher.watch()


async def test_a_role_killed_from_outside_is_reported_with_its_signal(launcher: LocalLauncher, tmp_path: Path) -> None:
    process = await start_and_wait(launcher, "wait_for_stop", tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LifecycleError, match="killed by SIGKILL"):
        await launcher.watch()


async def test_a_role_whose_work_is_done_may_leave(launcher: LocalLauncher) -> None:
    process = launcher.start(role("leave"))
    process.expect_exit()
    assert await process.left() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await launcher.watch()


async def test_a_role_whose_work_is_done_leaves_at_once_and_loses_no_print(launcher: LocalLauncher) -> None:
    process = launcher.start(role("leave_slowly"))
    process.expect_exit()
    assert await process.left() == 0
    assert "all is done" in (launcher.logs / "trainer.log").read_text()


async def test_a_role_whose_work_is_done_may_not_crash(launcher: LocalLauncher) -> None:
    launcher.start(role("fail")).expect_exit()
    with pytest.raises(LifecycleError, match="with status 1"):
        await launcher.watch()


async def test_a_stopped_role_cleans_up(launcher: LocalLauncher, tmp_path: Path) -> None:
    process = await start_and_wait(launcher, "wait_for_stop", tmp_path)
    await process.stop()
    assert process.status == ExitCode.TERMINATED
    assert (tmp_path / "cleaned up").exists()
    assert not process.has_failed


async def test_a_role_that_ignores_terminate_is_killed_after_its_deadline(tmp_path: Path) -> None:
    async with LocalLauncher("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=0.5)) as launcher:
        process = await start_and_wait(launcher, "ignore_terminate", tmp_path)
        await process.stop()
        assert await process.left() == process.status == -signal.SIGKILL


async def test_ctrl_c_in_the_terminal_does_not_reach_a_role(launcher: LocalLauncher, tmp_path: Path) -> None:
    process = await start_and_wait(launcher, "wait_for_stop", tmp_path)
    os.kill(process.pid, signal.SIGINT)
    await process.stop()
    assert process.status == ExitCode.TERMINATED


async def test_a_role_leaves_sigterm_to_its_parent(launcher: LocalLauncher, tmp_path: Path) -> None:
    """A cluster scheduler sends it to every process of a job; the run decides what ends when."""
    process = await start_and_wait(launcher, "wait_for_stop", tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    log = launcher.logs / "trainer.log"
    async with asyncio.timeout(PATIENCE_S):
        while "SIGTERM is left to the process that started this one" not in log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert process.is_running
    await process.stop()
    assert process.status == ExitCode.TERMINATED


async def test_a_role_that_is_stopped_is_killed_for_its_silence(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, silence_s=1.0) as launcher:
        process = await start_and_wait(launcher, "wait_for_stop", tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            LifecycleError, match=r"the trainer was killed: it was stopped, and gave no sign of life for "
        ):
            await launcher.watch()
        assert process.status == -signal.SIGKILL


async def test_a_role_that_is_silent_and_not_stopped_is_left_alone(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, silence_s=1.0) as launcher:
        process = await start_and_wait(launcher, "hold_the_interpreter", tmp_path)
        await asyncio.to_thread(wait_for_file, tmp_path / "done")
        assert is_left_alone(process, launcher)


async def test_a_role_that_holds_its_event_loop_is_killed_and_its_log_says_where(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, stuck_s=4.0) as launcher:
        await start_and_wait(launcher, "hold_its_loop", tmp_path)
        with pytest.raises(LifecycleError, match=r"(?s)its event loop has been held for .* in hold_its_loop"):
            await launcher.watch()


async def test_a_role_whose_thread_computes_is_left_alone_and_one_that_is_stuck_is_killed(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, stuck_s=4.0) as launcher:
        process = await start_and_wait(launcher, "work_in_a_thread", tmp_path)
        await asyncio.sleep(5)
        assert is_left_alone(process, launcher)
        (tmp_path / "get stuck").touch()
        with pytest.raises(LifecycleError, match=r"(?s)its thread has not computed for .* s in a long step .* in work"):
            await launcher.watch()


async def test_what_a_role_prints_without_a_line_of_its_log_is_bounded(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, silence_s=1.0) as launcher:
        await start_and_wait(launcher, "print_much", tmp_path)
        log, before = launcher.logs / "trainer.log", launcher.logs / "trainer.log.1"
        async with asyncio.timeout(PATIENCE_S):
            while log.stat().st_size:  # noqa: ASYNC110 - another process's file has no event here
                await asyncio.sleep(0.01)
        assert before.stat().st_size == 10_000


async def test_a_role_whose_log_is_on_a_disk_that_hangs_gives_signs_of_life(tmp_path: Path) -> None:
    async with hasty_launcher(tmp_path, silence_s=1.0, stuck_s=2.0) as launcher:
        process = await start_and_wait(launcher, "hang_in_its_log", tmp_path)
        await asyncio.sleep(3)
        assert is_left_alone(process, launcher)


async def test_what_a_role_started_ends_with_it(launcher: LocalLauncher, tmp_path: Path) -> None:
    process = await start_and_wait(launcher, "start_grandchild", tmp_path)
    grandchild = int(wait_for_file(tmp_path / "grandchild"))
    os.kill(process.pid, signal.SIGKILL)  # the role alone, not its group
    await process.left()
    await until_dead(grandchild)


async def test_closing_ends_every_role(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("trainer", "generator-0")]
    async with LocalLauncher("epoch", tmp_path / "logs") as launcher:
        for folder in folders:
            folder.mkdir()
            await start_and_wait(launcher, "wait_for_stop", folder, name=folder.name)
    assert [(folder / "cleaned up").exists() for folder in folders] == [True, True]


async def test_kill_waits_for_nothing(launcher: LocalLauncher, tmp_path: Path) -> None:
    process = await start_and_wait(launcher, "ignore_terminate", tmp_path)
    launcher.kill()
    await process.left()
    assert process.status == -signal.SIGKILL


@pytest.mark.parametrize("function", ["wait_for_stop", "ignore_terminate", "start_grandchild"])
def test_a_role_ends_by_itself_when_its_parent_is_killed(tmp_path: Path, function: str) -> None:
    script = Path(__file__).with_name("orphaning_parent.py")
    parent = subprocess.Popen([sys.executable, str(script), function, str(tmp_path)])
    pids = [int(wait_for_file(tmp_path / "running"))]
    if function == "start_grandchild":
        pids.append(int(wait_for_file(tmp_path / "grandchild")))
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_s, f"{function} outlived its parent"
        time.sleep(0.01)
    if function == "wait_for_stop":
        assert (tmp_path / "cleaned up").exists()


async def test_a_role_gets_its_threads_its_variables_and_no_input(launcher: LocalLauncher, tmp_path: Path) -> None:
    assert await launcher.start(role("write_environment", tmp_path / "environment")).left() == 0
    written = (tmp_path / "environment").read_text().split("\n")
    omp, mkl, colour, devices, leads_group, has_torch, standard_input = written
    assert (omp, mkl, colour, devices) == ("1", "1", "blue", "2,GPU-8")
    assert (leads_group, has_torch, standard_input) == ("True", "False", "''")
