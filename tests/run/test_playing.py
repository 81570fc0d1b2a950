"""What commands that play rollouts tell while they play."""

from __future__ import annotations

import asyncio
from typing import NoReturn, cast

from tailrace.config import RunSettings
from tailrace.rollouts import ChatRenderer, Rollouter
from tailrace.run.playing import Playing, Progress
from tailrace.simulation.virtual_time import run_in_virtual_time


def test_what_has_ended_is_reported_every_ten_seconds_and_the_work_s_result_returned() -> None:
    lines: list[str] = []

    async def never_fails() -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def work(progress: Progress) -> str:
        for _ in range(4):
            await asyncio.sleep(6)
            progress.one_ended()
        return "done"

    async def main() -> str:
        unused = cast(RunSettings, None), cast(ChatRenderer, None), cast(Rollouter, None)
        progress = Progress("sums", 4)
        return await Playing(*unused, lines.append, never_fails).within(work(progress), progress)

    assert run_in_virtual_time(main()) == "done"
    assert lines == ["sums: 1 of 4 rollouts have ended, 10 s", "sums: 3 of 4 rollouts have ended, 20 s"]
