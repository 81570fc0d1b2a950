from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOOPS = ["asyncio", "uvloop"]
ASKING = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 75)]


@contextmanager
def program(loop: str, manner: str) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("stopping_program.py")
    process = subprocess.Popen([sys.executable, str(script), loop, manner], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("number", "status"), ASKING)
def test_the_first_signal_asks_for_a_stop_and_decides_the_exit_status(
    loop: str, number: signal.Signals, status: int
) -> None:
    with program(loop, "waits") as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == status


@pytest.mark.parametrize("loop", LOOPS)
def test_the_second_signal_ends_everything_at_once(loop: str) -> None:
    with program(loop, "slow") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout
        assert process.stdout.readline() == "asked by INTERRUPTED\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stdout.read() == "aborted by INTERRUPTED\n"


def test_a_notice_of_preemption_is_followed_by_one_sigterm_that_ends_no_last_save() -> None:
    with program("asyncio", "slow") as process:
        assert process.stdout
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "asked by PREEMPTED\n"
        for number in (signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        while process.poll() is None:  # two that come at once are one
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == 143
        assert process.stdout.read() == "aborted by TERMINATED\n"


def test_a_terminal_that_goes_away_only_asks_however_often_it_says_so() -> None:
    with program("asyncio", "slow") as process:
        assert process.stdout
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "asked by HUNG_UP\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
        assert process.stdout.read() == "aborted by TERMINATED\n"


def test_a_run_that_nobody_hangs_up_goes_on() -> None:
    script = Path(__file__).with_name("stopping_program.py")
    ignoring = f"trap '' HUP; exec {sys.executable} {script} asyncio waits"
    process = subprocess.Popen(["sh", "-c", ignoring], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143


def test_the_second_signal_works_while_the_event_loop_is_stuck() -> None:
    with program("asyncio", "stuck") as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) in (130, 143)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("manner", "said"),
    [
        ("around-asleep", "stopped by TERMINATED\n"),
        ("around-waits", "asked by TERMINATED\n"),
        ("around-deaf", "took no notice\nready\nasked by TERMINATED\n"),
    ],
)
def test_a_signal_before_a_run_hears_them_is_not_lost(loop: str, manner: str, said: str) -> None:
    with program(loop, manner) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
        assert process.stdout
        assert process.stdout.read() == said


def test_a_signal_that_work_has_answered_is_the_first_to_what_is_around_it() -> None:
    with program("asyncio", "around-closes") as process:
        assert process.stdout
        process.send_signal(signal.SIGINT)
        assert [process.stdout.readline() for _ in range(2)] == ["asked by INTERRUPTED\n", "ready\n"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stdout.read() == ""  # it ended at once


def test_so_is_a_notice_of_preemption_and_the_sigterm_after_it_ends_nothing() -> None:
    with program("asyncio", "around-closes") as process:
        assert process.stdout
        process.send_signal(signal.SIGUSR1)
        assert [process.stdout.readline() for _ in range(2)] == ["asked by PREEMPTED\n", "ready\n"]
        for number in (signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
