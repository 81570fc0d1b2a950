from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from tailrace.environments import EnvironmentSettings, EnvironmentSpec
from tailrace.errors import RolloutTimeout
from tailrace.records import Task, TaskId
from tailrace.rollouts.deadline import Attempts, TimeLimit, rollout_deadline
from tailrace.rollouts.environment import LoadedEnvironment
from tailrace.rollouts.settings import RolloutSettings

TASK = Task(TaskId("sums/train/7"), "sums", 7, {})
PAST, FAR_S = 0.0, 3600.0
SOON, SOONER, FAR = (TimeLimit(limit_s, "rollouts.timeout_s") for limit_s in (5.0, 2.0, FAR_S))


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_deadline_names_the_task_and_the_line_that_waited() -> None:
    told = r"sums/train/7: not finished after 5 s \(rollouts.timeout_s\); it was waiting in wait_for_ever"
    with pytest.raises(RolloutTimeout, match=told), rollout_deadline(SOON, TASK, ends_s=PAST):
        await wait_for_ever()
    runner = asyncio.current_task()
    assert runner is not None
    assert not runner.cancelling()
    await asyncio.sleep(0)  # nothing of the deadline is left


def test_an_environments_own_limit_is_told_by_its_own_setting() -> None:
    spec = EnvironmentSpec(name="sums", agent=wait_with, train_tasks=[{}])
    of_run = RolloutSettings(timeout_s=9, reward_timeout_s=3)
    own = LoadedEnvironment.of(spec, of_run, EnvironmentSettings(name="sums", timeout_s=5))
    assert own.timeout == TimeLimit(5, "environment.timeout_s")
    assert own.score_timeout == TimeLimit(3, "rollouts.reward_timeout_s")
    assert LoadedEnvironment.of(spec, of_run).timeout == TimeLimit(9, "rollouts.timeout_s")


async def test_what_ends_in_time_is_left_alone() -> None:
    with rollout_deadline(FAR, TASK):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="their socket"), rollout_deadline(FAR, TASK):
        raise TimeoutError("their socket")


async def test_a_cancellation_by_somebody_else_is_not_taken_for_the_deadline() -> None:
    async def attempt() -> None:
        with rollout_deadline(SOON, TASK, ends_s=PAST):
            try:
                await wait_for_ever()
            except asyncio.CancelledError:
                attempted.cancel()
                raise

    attempted = asyncio.ensure_future(attempt())
    with pytest.raises(asyncio.CancelledError):
        await attempted


async def test_of_two_deadlines_the_outer_one_is_told_where_it_passes_first() -> None:
    outer = rollout_deadline(SOONER, TASK, ends_s=PAST)
    with pytest.raises(RolloutTimeout, match="after 2 s"), outer, rollout_deadline(FAR, TASK):
        await wait_for_ever()


class Large:
    """What an agent holds."""


async def raise_with(large: Large) -> None:
    raise ValueError(f"no {large}")


async def wait_with(large: Large) -> None:
    await wait_for_ever()
    del large


@pytest.mark.parametrize(("work", "limit_s"), [(raise_with, FAR_S), (wait_with, PAST)])
async def test_what_failed_is_freed_without_the_collector(
    work: Callable[[Large], Awaitable[None]], limit_s: float
) -> None:
    large, attempts = Large(), Attempts(cancel_s=0.01)
    is_left = weakref.ref(large)
    gc.disable()
    try:
        with contextlib.suppress(ValueError, RolloutTimeout):
            await attempts.run(work(large), what="it", limit_s=limit_s)
        del large
        await asyncio.sleep(0)
        assert is_left() is None
    finally:
        gc.enable()
