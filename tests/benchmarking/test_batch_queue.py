"""What `benchmarks/batch_queue.py` counts as the event loop's time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from tests.support.benchmark_programs import benchmark

batch_queue = benchmark("batch_queue")


class SlowSender:
    """Takes 5 ms of the loop in a task of its own, and as much time in which the loop is free."""

    async def send(self, _batch: object) -> None:
        await asyncio.shield(asyncio.create_task(self._write_and_send()))

    async def _write_and_send(self) -> None:
        await asyncio.sleep(0.005)
        time.sleep(0.005)  # noqa: ASYNC251  - the loop's time is what is measured


async def test_loop_time_of_a_send_is_that_of_its_tasks_too() -> None:
    batch = SimpleNamespace(num_tokens=0, summary=SimpleNamespace(step=1))
    loop_s, wall_s, _ = await batch_queue.send(SlowSender(), [], batch)
    assert 0.005 <= loop_s <= wall_s - 0.004
    assert asyncio.get_running_loop().get_task_factory() is None
