"""What a worker holds ends with the report that its order asks for."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.errors import CorruptData
from tailrace.rollouts.agent_workers.held import Held
from tailrace.rollouts.agent_workers.messages import Played, Scored
from tailrace.rollouts.scoring.usage import JudgeUsage


async def test_a_rollout_is_not_ended_by_what_came_of_a_score() -> None:
    held = Held("rollout g0.0", 1, Played, asyncio.get_running_loop().create_future())
    with pytest.raises(CorruptData, match=r"rollout g0\.0 was answered with Scored"):
        held.end(Scored(key="g0.0", judge=JudgeUsage()))
    assert not held.ended.done()


async def test_what_nobody_waits_for_any_more_may_still_end() -> None:
    held = Held("the score of group g0", 1, Scored, asyncio.get_running_loop().create_future())
    held.ended.cancel()
    held.end(Scored(key="score 1", judge=JudgeUsage()))
