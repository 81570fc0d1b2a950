"""What rollouts were played with is closed part by part, and the log says what came of each."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.rollouts.closing import close_all


async def test_a_close_that_nobody_cancelled_failed_with_the_cancellation_that_it_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = []

    async def raises() -> None:
        raise asyncio.CancelledError

    async def ends() -> None:
        await asyncio.sleep(0)
        closed.append("other")

    await close_all({"one": raises, "other": ends})
    assert closed == ["other"]
    assert [record.getMessage() for record in caplog.records] == ["one could not be closed: it raised CancelledError"]


async def test_a_close_that_is_cancelled_was_given_up(caplog: pytest.LogCaptureFixture) -> None:
    closing = asyncio.create_task(close_all({"one": asyncio.Event().wait}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert [record.getMessage() for record in caplog.records] == ["the close of one was given up before it had ended"]
