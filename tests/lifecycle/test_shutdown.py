from __future__ import annotations

import asyncio

import pytest

from tailrace.lifecycle.settings import ShutdownSettings
from tailrace.lifecycle.shutdown import Action, ShutdownStage, StageOutcome, plan_shutdown, run_stages


def recording(done: list[ShutdownStage], stage: ShutdownStage) -> Action:
    async def action() -> None:
        done.append(stage)

    return action


def test_stages_are_planned_in_their_order_with_their_deadlines_whatever_order_they_are_given_in() -> None:
    async def nothing() -> None: ...

    given = [ShutdownStage.CLOSE_EVENT_LOG, ShutdownStage.LAST_SAVE, ShutdownStage.STOP_ADMISSION]
    planned = plan_shutdown(ShutdownSettings(last_save_s=7), dict.fromkeys(given, nothing))
    assert [stage.stage for stage in planned] == list(reversed(given))
    assert planned[1].deadline_s == 7


def test_every_stage_has_a_deadline() -> None:
    async def nothing() -> None: ...

    assert len(plan_shutdown(ShutdownSettings(), dict.fromkeys(ShutdownStage, nothing))) == len(ShutdownStage)


async def test_a_stage_that_fails_or_overruns_is_named_and_the_next_ones_run() -> None:
    done: list[ShutdownStage] = []
    cancelled = asyncio.Event()

    async def fails() -> None:
        raise ValueError("no room")

    async def overruns() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    actions = {stage: recording(done, stage) for stage in ShutdownStage}
    actions |= {ShutdownStage.CANCEL_ROLLOUTS: fails, ShutdownStage.LAST_SAVE: overruns}
    reports = await run_stages(plan_shutdown(ShutdownSettings(last_save_s=0.01), actions))
    outcomes = {report.stage: report.outcome for report in reports if report.outcome is not StageOutcome.DONE}
    assert outcomes == {
        ShutdownStage.CANCEL_ROLLOUTS: StageOutcome.FAILED,
        ShutdownStage.LAST_SAVE: StageOutcome.OVERRAN,
    }
    assert len(done) == len(ShutdownStage) - 2
    assert cancelled.is_set()
    assert "no room" in str(reports[1])
    assert "last_save overran" in str(reports[2])


async def test_cancelling_a_shutdown_cancels_the_stage_it_is_in() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    running = asyncio.create_task(run_stages(plan_shutdown(ShutdownSettings(), {ShutdownStage.LAST_SAVE: waits})))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await cancelled.wait()
