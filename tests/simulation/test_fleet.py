from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tailrace.records import Completion, FinishReason, GenerationRequest, SamplingParams
from tailrace.simulation.fleet import ModelledFleet
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.replica import CHUNK_TOKENS
from tailrace.simulation.settings import EngineSettings, LognormalLengths, ModelledTrainerSettings
from tailrace.simulation.virtual_time import run_in_virtual_time

LENGTH = 500


def with_fleet(test: Callable[[ModelledFleet], Awaitable[Any]], *, replicas: int = 1, slots: int = 8) -> Any:
    """Run a test over engines whose steps take a second and 10 ms per request, and whose completions are 500 long."""

    async def main() -> Any:
        fleet = ModelledFleet(
            EngineSettings(replicas=replicas, slots=slots, step_base_s=1.0, step_per_running_s=0.01),
            ModelledTrainerSettings(train_s=1.0, sync_s=5.0),
            LengthSource(LognormalLengths(mean_log=float(np.log(LENGTH)), sigma=0.0, task_sigma=0.0), seed=0),
            max_staleness=4,
            restart_s=30.0,
        )
        running = asyncio.create_task(fleet.run())
        await asyncio.sleep(0)
        await fleet.load(0)
        try:
            return await test(fleet)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return run_in_virtual_time(main())


async def ask(fleet: ModelledFleet, name: str = "a", *, prefix: Completion | None = None) -> Completion:
    return await fleet.router.generate(
        GenerationRequest(
            request_id=name,
            session_id=name,
            group_id="task#1",
            prompt_token_ids=np.zeros(10, np.int32),
            sampling=SamplingParams(max_tokens=1000),
            prefix=prefix,
        )
    )


def test_weights_that_come_in_the_middle_of_a_completion_stamp_the_rest_of_it() -> None:
    async def test(fleet: ModelledFleet) -> Completion:
        asked = asyncio.create_task(ask(fleet))
        await asyncio.sleep(101.0)
        await fleet.load(1)
        return await asked

    completion = with_fleet(test)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.num_tokens == LENGTH
    versions, counts = np.unique(completion.policy_versions, return_counts=True)
    assert versions.tolist() == [0, 1]
    assert counts[0] == pytest.approx(100, abs=6)


def test_an_interrupted_completion_goes_on_to_its_own_length() -> None:
    async def test(fleet: ModelledFleet) -> tuple[Completion, Completion]:
        asked = asyncio.create_task(ask(fleet))
        await asyncio.sleep(50.0)
        await fleet.router.interrupt(["a"])
        part = await asked
        return part, await ask(fleet, prefix=part)

    part, whole = with_fleet(test)
    assert part.finish_reason is FinishReason.ABORTED
    assert 40 < part.num_tokens < 50
    assert whole.num_tokens == LENGTH


def test_what_replicas_hand_back_unasked_goes_on_and_nothing_is_sampled_twice() -> None:
    async def test(fleet: ModelledFleet) -> None:
        asked = asyncio.create_task(ask(fleet))
        await asyncio.sleep(50.0)
        await fleet.interrupt()
        assert (await asked).num_tokens == fleet.sampled_tokens == LENGTH

    with_fleet(test)


def test_a_replica_that_dies_costs_less_than_a_chunk_of_each_request() -> None:
    async def test(fleet: ModelledFleet) -> None:
        asked = [asyncio.create_task(ask(fleet, name)) for name in "abcd"]
        await asyncio.sleep(100.0)
        assert fleet.kill(0)
        completions = await asyncio.gather(*asked)
        assert [completion.num_tokens for completion in completions] == [LENGTH] * 4
        assert 0 < fleet.sampled_tokens - 4 * LENGTH < 4 * CHUNK_TOKENS
        assert sum(replica.restarts for replica in fleet.router.replicas) == 1

    with_fleet(test, replicas=2)


def test_a_cancelled_request_frees_its_slot() -> None:
    async def test(fleet: ModelledFleet) -> None:
        first = asyncio.create_task(ask(fleet, "first"))
        await asyncio.sleep(10.0)
        second = asyncio.create_task(ask(fleet, "second"))
        await asyncio.sleep(10.0)
        assert (fleet.running, fleet.waiting) == (1, 1)
        first.cancel()
        assert (await second).num_tokens == LENGTH
        assert first.cancelled()

    with_fleet(test, slots=1)


def test_a_burst_is_spread_over_the_replicas_whatever_they_hold() -> None:
    async def test(fleet: ModelledFleet) -> tuple[int, int]:
        asked = [asyncio.create_task(ask(fleet, "long"))]
        await asyncio.sleep(100.0)
        asked += [asyncio.create_task(ask(fleet, f"new-{number}")) for number in range(12)]
        await asyncio.sleep(3.0)
        found = fleet.running, fleet.waiting
        await asyncio.gather(*asked)
        return found

    assert with_fleet(test, replicas=2) == (13, 0)
