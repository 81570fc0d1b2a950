from __future__ import annotations

import asyncio

import pytest

from tailrace.config.shutdown import ShutdownSettings
from tailrace.lifecycle.shutdown import ShutdownStage, run_stage


@pytest.mark.parametrize("stage", ShutdownStage)
async def test_every_stage_has_a_deadline(stage: ShutdownStage, caplog: pytest.LogCaptureFixture) -> None:
    async def nothing() -> None: ...

    await run_stage(stage, ShutdownSettings(), nothing)
    assert not caplog.text


async def test_a_stage_that_overruns_is_cancelled_and_named(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = asyncio.Event()

    async def overruns() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    settings = ShutdownSettings(close_transports_s=0.01)
    await run_stage(ShutdownStage.CLOSE_TRANSPORTS, settings, overruns)
    assert cancelled.is_set()
    assert "close_transports took longer than its 0.01 s" in caplog.text


async def test_a_stage_that_fails_is_named_and_the_shutdown_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("no room")

    await run_stage(ShutdownStage.STOP_GENERATORS, ShutdownSettings(), fails)
    assert "stop_generators failed: no room" in caplog.text


async def test_cancelling_a_shutdown_cancels_the_stage_it_is_in() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    running = asyncio.create_task(run_stage(ShutdownStage.CANCEL_ROLLOUTS, ShutdownSettings(), waits))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await cancelled.wait()
