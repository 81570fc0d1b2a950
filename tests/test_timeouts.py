"""A deadline holds in the clean-up of a cancelled task as anywhere else."""

from __future__ import annotations

import asyncio
from types import TracebackType

import pytest

from tailrace.timeouts import timeout, timeout_at


async def test_one_that_runs_out_in_the_clean_up_of_a_cancelled_task_says_so() -> None:
    begun, cleaned = asyncio.Event(), []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            with pytest.raises(TimeoutError):
                async with timeout(0.01):
                    await asyncio.Event().wait()
            cleaned.append("all of it")

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["all of it"]


async def test_one_whose_task_is_cancelled_within_it_is_none_that_ran_out() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        async with timeout(60):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_hold_with_python_3_11_2_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a deadline that ran out says so only in a task that nobody has asked to end."""
    of_this_python = asyncio.Timeout.__aexit__

    async def as_in_3_11_2(
        self: asyncio.Timeout,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await of_this_python(self, kind, error, trace)
        except TimeoutError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise

    monkeypatch.setattr(asyncio.Timeout, "__aexit__", as_in_3_11_2)
    await test_one_that_runs_out_in_the_clean_up_of_a_cancelled_task_says_so()
    await test_one_whose_task_is_cancelled_within_it_is_none_that_ran_out()


async def test_it_runs_out_at_a_time_of_the_loop_or_never() -> None:
    with pytest.raises(TimeoutError):
        async with timeout_at(asyncio.get_running_loop().time()):
            await asyncio.Event().wait()
    async with timeout(None) as deadline:
        await asyncio.sleep(0)
    assert not deadline.expired()
