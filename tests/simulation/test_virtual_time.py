from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from tailrace.errors import Deadlock
from tailrace.simulation import run_in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_starts_at_zero_and_jumps_to_the_next_timer() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, now()))

    async def main() -> None:
        assert now() == 0.0
        await asyncio.gather(sleeper("day", 86_400.0 * 3), sleeper("hour", 3600.0), sleeper("blink", 0.1))

    since = time.monotonic()
    run_in_virtual_time(main())
    assert seen == [("blink", 0.1), ("hour", 3600.0), ("day", 259_200.0)]
    assert time.monotonic() - since < 3600


def test_timers_fire_exactly_when_they_are_due_however_late_it_is() -> None:
    async def main() -> list[float]:
        await asyncio.sleep(1e9 / 3)
        times = []
        for _ in range(100):
            before = now()
            await asyncio.sleep(0.015)
            assert now() == before + 0.015
            times.append(now())
        return times

    assert run_in_virtual_time(main()) == run_in_virtual_time(main())


def test_a_deadline_passes_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return now()

    assert run_in_virtual_time(main()) == 600.0


def test_a_deadlock_names_the_tasks_that_wait_and_where() -> None:
    never = asyncio.Event()

    async def starve() -> None:
        await never.wait()

    async def main() -> None:
        await asyncio.sleep(5)
        async with asyncio.TaskGroup() as group:
            group.create_task(starve(), name="hungry one")

    with pytest.raises(Deadlock, match=r"at 5 s .*2 tasks wait(.|\n)*hungry one in Event.wait"):
        run_in_virtual_time(main())


def test_sleeping_for_ever_is_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run_in_virtual_time(asyncio.sleep(float("inf")))


def test_threads_are_calls_and_their_errors_arrive() -> None:
    def fail() -> None:
        raise ValueError("in the thread")

    async def main() -> int:
        with pytest.raises(ValueError, match="in the thread"):
            await asyncio.to_thread(fail)
        return await asyncio.to_thread(sum, [1, 2])

    assert run_in_virtual_time(main()) == 3


def test_what_main_raises_is_raised_and_what_it_leaves_is_cancelled() -> None:
    ended: list[str] = []

    async def left_over() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(left_over())
        await asyncio.sleep(1)
        assert not task.done()
        raise LookupError("from main")

    with pytest.raises(LookupError, match="from main"):
        run_in_virtual_time(main())
    assert ended == ["cancelled"]


ORDER = """
import asyncio
from tailrace.simulation import run_in_virtual_time

async def wait(name, order):
    try:
        await asyncio.sleep(9)
    finally:
        order.append(name)

async def main():
    order = []
    padding = [object() for _ in range({padding})]  # other addresses
    try:
        async with asyncio.TaskGroup() as group:
            for name in range(40):
                group.create_task(wait(name, order))
            await asyncio.sleep(1)
            raise LookupError
    except* LookupError:
        print(order)

run_in_virtual_time(main())
"""


def test_tasks_of_a_group_are_cancelled_in_the_same_order_in_every_process() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", ORDER.format(padding=padding)], check=True, capture_output=True, text=True
        ).stdout
        for padding in (0, 777)
    ]
    assert printed[0] == printed[1] != ""
