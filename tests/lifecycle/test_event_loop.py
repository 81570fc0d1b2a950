from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading

import pytest

from tailrace.lifecycle.event_loop import run_on_event_loop


def test_it_returns_what_the_work_returns_and_ends_what_it_left_running() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def work() -> int:
        kept.append(asyncio.create_task(background()))
        await asyncio.sleep(0)
        return 3

    kept: list[asyncio.Task[None]] = []
    assert run_on_event_loop(work()) == 3
    assert ended == [True]


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_is_uvloops_where_that_is_installed(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it could not be imported

    async def module() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run_on_event_loop(module()).startswith("uvloop") == is_installed


def test_it_raises_what_the_work_raises() -> None:
    async def work() -> None:
        raise KeyError("oh")

    with pytest.raises(KeyError, match="oh"):
        run_on_event_loop(work())


def test_a_task_that_ignores_its_cancellation_is_named_and_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lifecycle.event_loop._END_S", 0.01)

    async def refuse() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def work() -> int:
        kept.append(asyncio.create_task(refuse(), name="rollout r0"))
        await asyncio.sleep(0)
        return 3

    kept: list[asyncio.Task[None]] = []
    with caplog.at_level(logging.ERROR, logger="tailrace"):
        assert run_on_event_loop(work()) == 3
    assert "ignores its cancellation: rollout r0" in caplog.text


def test_a_thread_that_never_returns_is_told_and_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lifecycle.event_loop._END_S", 0.01)
    monkeypatch.setattr("tailrace.lifecycle.event_loop._stuck", set())
    may_return = threading.Event()

    async def work() -> int:
        asyncio.get_running_loop().run_in_executor(None, may_return.wait)
        return await asyncio.to_thread(lambda: 3)

    with caplog.at_level(logging.ERROR, logger="tailrace"):
        assert run_on_event_loop(work()) == 3
    may_return.set()
    assert "as they do not return: 1 calls in threads" in caplog.text


HANGING = """
import sys, threading
from tailrace.lifecycle.event_loop import force_exit_if_threads_hang
threading.Thread(target=threading.Event().wait, name="of-the-user").start()
force_exit_if_threads_hang(3, within_s=0.1)
sys.exit(3)
"""


def test_a_thread_of_users_code_that_never_ends_does_not_keep_the_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "they do not end: threads of-the-user" in done.stderr) == (3, True), done.stderr


WITH_AN_ENGINE = """
import atexit
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.lifecycle.event_loop import force_exit_if_threads_hang
atexit.register(print, "the interpreter exits")
generator = Generator(SimulatedEngine)
print("done")
force_exit_if_threads_hang(3)
"""


def test_a_process_whose_engine_still_runs_ends_before_the_interpreter_does() -> None:
    """What is in torch's code by then aborts the process, and its status with it."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_AN_ENGINE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr
