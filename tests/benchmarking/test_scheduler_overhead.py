"""`benchmarks/scheduler_overhead.py` tells its scheduler all that a run does: without it rollouts end to start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.models.loading import tokenizer_folder
from tailrace.rollouts import ChatRenderer
from tests.support.benchmark_programs import benchmark

scheduler_overhead = benchmark("scheduler_overhead")


async def test_rollouts_start_for_longer_than_weights_may_trail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", tmp_path))
    case = scheduler_overhead.Case("in-flight-64", 64, renderer, quick=True)
    settings = case.settings
    least = 3 * settings.max_staleness * settings.batch_size
    monkeypatch.setattr(scheduler_overhead, "LEAST_ROLLOUTS", least)
    async with asyncio.timeout(60):
        row = await scheduler_overhead.measure(case)
    assert row.rollouts >= least
