from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tailrace.observability.lag import LoopLagMonitor
from tailrace.observability.phases import PhaseTimer


def hold_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_held_loop_is_measured_and_the_log_names_the_function(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with LoopLagMonitor(0.01, stall_s=0.1) as lag:
            await asyncio.sleep(0.03)
            hold_the_loop(0.4)
            await asyncio.sleep(0.05)
            statistics = lag.flush()
    assert statistics.max_s > 0.3
    assert statistics.stalls == 1
    assert statistics.p50_s <= statistics.p90_s <= statistics.p99_s <= statistics.max_s
    assert caplog.text.count("hold_the_loop") >= 1
    assert caplog.text.count("has been held") == 1


async def test_a_snapshot_taken_right_after_a_stall_shows_it() -> None:
    async with LoopLagMonitor(0.01, stall_s=10) as lag:
        await asyncio.sleep(0.03)
        hold_the_loop(0.2)
        assert lag.snapshot().max_s > 0.1


async def test_a_flush_starts_over() -> None:
    async with LoopLagMonitor(0.01) as lag:
        await asyncio.sleep(0.02)
        hold_the_loop(0.2)
        await asyncio.sleep(0.02)
        assert lag.flush().max_s > 0.1
    assert lag.snapshot().max_s < 0.1


async def test_stopping_leaves_no_task_behind_and_starting_twice_is_refused() -> None:
    monitor = LoopLagMonitor(0.01)
    await monitor.start()
    with pytest.raises(RuntimeError, match="already running"):
        await monitor.start()
    await monitor.stop()
    await monitor.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_phases_add_up_and_start_over() -> None:
    timer = PhaseTimer()
    timer.add("score", 0.5)
    timer.add("score", 0.25)
    timer.add("pack", 2.0)
    assert timer.flush() == {"phase/score_s": 0.75, "phase/pack_s": 2.0}
    assert timer.flush() == {}
