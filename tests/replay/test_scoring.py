from __future__ import annotations

import pytest

from tailrace.records import Group, GroupId, Message, Reward, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.replay.scoring import environments_of, rescoring
from tests.run.runs import tiny_settings


async def test_what_reward_functions_had_added_is_not_added_again() -> None:
    messages: list[Message] = [{"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "yes"}]
    captured = Reward(1.5, {"said_so": 1.0, "brief": 1.0})  # the environment's 0.5, and 1 of the function `brief`
    task = Task(TaskId("said/0"), "said", 0, {"prompt": "Say yes"})
    rollout = Rollout(RolloutId("r"), GroupId("g"), task, SamplingParams(), messages=messages, reward=captured, turns=1)
    settings = tiny_settings("--environment.name", "tests.support.trl_environments:said")
    async with rescoring(settings, environments_of(settings)) as score_again:
        assert score_again is not None
        await score_again([Group(GroupId("g"), task, [rollout])])
    assert rollout.reward is not None
    assert rollout.reward.value == pytest.approx(1.5)
    assert rollout.reward.components == captured.components
