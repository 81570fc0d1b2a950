from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from tailrace.tracing.lag import CoreWait, LoopLagMonitor
from tailrace.tracing.phases import PhaseRecorder, phase

PATIENCE_S = 60.0


def hold_the_loop(seconds: float) -> None:
    time.sleep(seconds)


def hold_until_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Until the thread beside the loop has had the time to write its stack down, with this function on top."""
    deadline_s = time.monotonic() + PATIENCE_S
    while "in hold_until_it_is_told" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


async def test_a_held_loop_is_measured_and_the_log_names_the_function(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with LoopLagMonitor(0.01, stall_s=0.1) as lag:
            await asyncio.sleep(0.03)
            hold_until_it_is_told(caplog)
            await asyncio.sleep(0.05)
            statistics = lag.flush()
    assert statistics.max_s > 0.1
    assert statistics.stalls >= 1
    assert statistics.p50_s <= statistics.p90_s <= statistics.p99_s <= statistics.max_s
    assert "hold_until_it_is_told" in caplog.text


async def test_a_snapshot_taken_right_after_a_stall_shows_it() -> None:
    async with LoopLagMonitor(0.01, stall_s=10) as lag:
        await asyncio.sleep(0.03)
        hold_the_loop(0.2)
        assert lag.snapshot().max_s > 0.1


async def test_a_flush_starts_over() -> None:
    async with LoopLagMonitor(0.01) as lag:
        await asyncio.sleep(0.02)
        hold_the_loop(0.2)
        let_go_s = time.monotonic()
        await asyncio.sleep(0.02)
        assert lag.flush().max_s > 0.1
        await asyncio.sleep(0.02)
        assert lag.snapshot().max_s < time.monotonic() - let_go_s  # whatever there is came later


def test_what_a_thread_waited_for_a_core_is_what_linux_tells(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("100 1500000000 7\n")
    wait = CoreWait(path)
    path.write_text("200 4000000000 9\n")
    assert (wait.since_s(), wait.since_s()) == (2.5, 0.0)
    wait.close()
    assert CoreWait(tmp_path / "none").since_s() == 0.0


async def test_code_that_waits_on_the_loop_holds_it() -> None:
    async with LoopLagMonitor(0.01) as lag:
        await asyncio.sleep(0.02)
        hold_the_loop(0.2)
        await asyncio.sleep(0.02)
        statistics = lag.flush()
    assert 0.0 < statistics.held_max_s <= statistics.max_s


async def test_stopping_leaves_no_task_behind() -> None:
    async with LoopLagMonitor(0.01):
        await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_warning_names_the_phase_that_held_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        with phase("score"):
            hold_until_it_is_told(caplog)

    with caplog.at_level(logging.WARNING), PhaseRecorder().recording() as phases:
        async with LoopLagMonitor(0.01, stall_s=0.1, phases=phases):
            await asyncio.sleep(0.03)
            await asyncio.create_task(work())
            await asyncio.sleep(0.05)  # the heartbeat is overdue, so it comes first
    assert "has been held for over 0.1 s in phase 'score'" in caplog.text
    assert "s of it in phase 'score'" in caplog.text
