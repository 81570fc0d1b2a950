"""Where a process stands is told frame by frame, also where tasks wait inside of others."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator

from tailrace.tracing.stacks import frames_of, write_task_stacks

ASKED = """
import asyncio, os, sys
from tailrace.tracing.stacks import STACKS, write_stacks_when_asked

async def wait_for_ever():
    await asyncio.Event().wait()

async def main():
    write_stacks_when_asked()
    waiting = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0)
    os.kill(os.getpid(), STACKS)
    await asyncio.sleep(0.01)
    waiting.cancel()

asyncio.run(main())
"""


async def innermost() -> None:
    await asyncio.Event().wait()


async def outermost() -> None:
    await innermost()


async def test_the_frames_of_a_task_lead_to_where_it_waits() -> None:
    task = asyncio.create_task(outermost())
    await asyncio.sleep(0)
    names = [frame.f_code.co_name for frame in frames_of(task)]
    assert names == ["outermost", "innermost", "wait"]
    task.cancel()


async def test_tasks_that_wait_alike_are_told_once() -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1
        await innermost()

    async def read() -> None:
        async for _ in numbers():
            pass

    tasks = [asyncio.create_task(work()) for work in (outermost, outermost, read)]
    await asyncio.sleep(0)
    told = io.StringIO()
    write_task_stacks(told)
    assert told.getvalue().count("in innermost\n") == 1
    assert "2 tasks wait here (most recent call last):" in told.getvalue()
    assert "in read\n" in told.getvalue()
    for task in tasks:
        task.cancel()


def test_a_process_that_is_asked_tells_of_its_threads_and_its_tasks() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert "thread 0x" in done.stderr
    assert "1 task waits here" in done.stderr
    assert "in wait_for_ever" in done.stderr
