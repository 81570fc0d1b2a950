"""The loop, taken iteration by iteration: no thread, no clock."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from tailrace.errors import EngineFailed, RequestRefused
from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.handover import Staged, Waiter
from tailrace.generation.engine_thread.inbox import Interruption
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.records import Completion, FinishReason, GenerationRequest
from tests.generation.engine_support import request
from tests.generation.loop_support import World, let_others_run


async def occupancy(engine: SimulatedEngine, slots: int, sessions: int, turns: int) -> float:
    """Running slots over slots, until the first session has nothing left."""
    world, lengths = World(engine), random.Random(0)
    session_over = asyncio.Event()

    async def session(name: str) -> Completion:
        for turn in range(turns):
            length = lengths.randint(40, 80)
            done = await world.inbox.generate(request(f"{name}/{turn}", [1, 2], session=name, max_tokens=length))
        session_over.set()
        return done

    tasks = [world.start(session(f"s{i}")) for i in range(sessions)]
    while not session_over.is_set():
        await world.iterate()
    statistics = engine.statistics()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return statistics.sampled_tokens_total / (statistics.steps_total * slots)


class BurstEngine(SimulatedEngine):
    """Fills its slots only once in 16 steps."""

    def _place_waiting(self) -> None:
        if self.statistics().steps_total % 16 == 0:
            super()._place_waiting()


async def test_short_turns_of_many_sessions_keep_the_slots_taken() -> None:
    assert await occupancy(SimulatedEngine(slots=32), 32, sessions=64, turns=5) > 0.95
    assert await occupancy(BurstEngine(slots=32), 32, sessions=64, turns=5) < 0.93  # what this workload tells apart


async def test_as_many_sessions_as_slots_lose_only_the_step_between_two_turns() -> None:
    assert await occupancy(SimulatedEngine(slots=32), 32, sessions=32, turns=5) > 0.95


async def test_what_many_requests_sampled_is_handed_out_in_order_with_pauses() -> None:
    world = World(SimulatedEngine(slots=500, chunk_tokens=1))
    names, heard, counts = [f"r{number}" for number in range(500)], list[str](), [0]
    for name in names:

        def hear(chunk: Completion, name: str = name) -> None:
            heard.append(name)

        world.start(world.inbox.generate(request(name, (1, 2), max_tokens=2), hear))
    await let_others_run()
    for _ in range(2):
        world.loop.act(world.inbox.decide(world.loop.state, world.policy))
    done = asyncio.ensure_future(asyncio.gather(*world.tasks))
    while not done.done():
        await asyncio.sleep(0)
        counts.append(len(heard))
    assert heard == 2 * names
    assert max(np.diff(counts)) <= 128
    assert [completion.num_tokens for completion in done.result()] == [2] * 500


async def test_several_requests_may_finish_in_one_step_and_each_learns_how_many_were_in_flight() -> None:
    world = World(SimulatedEngine(slots=4))
    for i in range(6):
        world.ask(f"r{i}", length=3)
    await world.iterate()
    assert (world.loop.statistics.running, world.loop.statistics.waiting) == (4, 2)
    done = await world.finish()
    assert [completion.num_tokens for completion in done] == [3] * 6
    assert [completion.metrics["in_flight"] for completion in done] == [6, 5, 4, 3, 2, 1]
    assert world.engine.statistics().steps_total == 6
    assert (world.loop.statistics.running, world.loop.statistics.waiting) == (0, 0)
    for completion in done:
        assert {"queue_s", "time_to_first_token_s", "decode_s", "preemptions", "cached_prompt_tokens"} <= set(
            completion.metrics
        )


async def test_more_than_one_sequence_and_an_id_in_use_are_refused_and_cost_nobody_else() -> None:
    world = World(SimulatedEngine())
    good = world.ask("r")
    many = asyncio.create_task(world.inbox.generate(request("many", [1], n=4)))
    await world.iterate()
    twin = asyncio.create_task(world.inbox.generate(request("r", [1])))
    await world.iterate()
    with pytest.raises(RequestRefused, match=r"request many: sampling.n is 4; a request samples one sequence"):
        await many
    with pytest.raises(RequestRefused, match="request r is running already"):
        await twin
    await world.finish()
    assert good.result().num_tokens == 3


class ThrowsAtOne(SimulatedEngine):
    """Fails, and refuses nothing, when it is given the request `bad`."""

    def add(self, request: GenerationRequest) -> None:
        if request.request_id == "bad":
            raise ZeroDivisionError("no such temperature")
        super().add(request)


async def test_an_engine_that_fails_at_one_request_fails_those_that_came_with_it_too() -> None:
    world = World(ThrowsAtOne())
    tasks = [world.ask(name) for name in ("before", "bad", "after")]
    await let_others_run()
    handed_back: Waiter[int] = Waiter.on_current_loop()
    world.inbox.put_interruption(Interruption(handed_back, frozenset(["before"])))
    with pytest.raises(ZeroDivisionError):
        await world.iterate()
    world.loop.fail(lambda: EngineFailed("no such temperature"))
    async with asyncio.timeout(20):
        ended = await asyncio.gather(*tasks, handed_back.future, return_exceptions=True)
    assert [type(one) for one in ended] == [EngineFailed] * 4


class BrokenNumbers(SimulatedEngine):
    """Its second token's log-probability is NaN, its third's infinite."""

    def step(self) -> list[SampledTokens]:
        chunks = super().step()
        for chunk in chunks:
            chunk.logprobs[1:3] = [np.nan, -np.inf]
        return chunks


async def test_logprobs_that_are_not_finite_are_counted_and_stay_what_they_are() -> None:
    world = World(BrokenNumbers())
    world.ask("r", length=5)
    [done] = await world.finish()
    assert done.metrics["nonfinite_logprobs"] == 2
    assert np.isfinite(done.logprobs).tolist() == [True, False, False, True, True]


async def test_a_drain_admits_nothing_until_the_new_weights_are_there() -> None:
    world = World(SimulatedEngine(slots=4), WeightPolicy("drain", "reset_prefix"))
    world.ask("before", length=5)
    await world.iterate()
    world.inbox.put_staged(Staged({}, 7))
    world.ask("after", length=4)
    done = await world.finish()
    assert [set(completion.policy_versions.tolist()) for completion in done] == [{0}, {7}]


async def test_recomputing_mixes_no_cache_and_keeping_counts_the_tokens_that_do() -> None:
    for kv_cache, mixed in (("recompute", 0), ("keep", 6), ("reset_prefix", 6)):
        world = World(SimulatedEngine(), WeightPolicy("hot_swap", kv_cache))
        world.ask("r", length=10)
        for _ in range(4):
            await world.iterate()
        world.inbox.put_staged(Staged({}, 2))
        [done] = await world.finish()
        assert done.policy_versions.tolist() == [0] * 4 + [2] * 6
        assert done.metrics["mixed_cache_tokens"] == mixed
        assert done.mixed_spans == (((4, 10),) if mixed else ())
        assert done.metrics["preemptions"] == (kv_cache == "recompute")


async def test_a_completion_tells_which_of_its_tokens_were_sampled_over_older_caches() -> None:
    world = World(SimulatedEngine(chunk_tokens=2))
    asked = request("r", [1, 2], max_tokens=14)
    task = world.start(world.inbox.generate(asked))
    for version in (0, 1, 2):
        if version:
            world.inbox.put_staged(Staged({}, version))
            await world.iterate()
        for _ in range(3):
            await world.iterate()
        if version == 1:  # what goes on after an interruption is computed anew, by the weights of then
            world.inbox.put_interruption(Interruption(Waiter.on_current_loop()))
            await world.iterate()
            task = world.start(world.inbox.generate(replace(asked, prefix=task.result())))
            await world.iterate()
    completion = (await world.finish())[-1]
    versions = completion.policy_versions.tolist()
    first, again = versions.index(1), versions.index(2)
    [(start, end), rest] = completion.mixed_spans
    assert start == first
    assert first < end < again
    assert rest == (again, 14)
    assert completion.metrics["mixed_cache_tokens"] == (end - start) + (14 - again)


class ResetRefused(SimulatedEngine):
    """Never lets go of its prefix cache."""

    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        super().reset_prefix_cache(preempt_running=False)


async def test_a_refused_reset_is_an_error_of_the_load_and_the_old_weights_go_on() -> None:
    world = World(ResetRefused(), WeightPolicy("hot_swap", "recompute"))
    world.ask("r", length=6)
    await world.iterate()
    staged = Staged({}, 3)
    world.inbox.put_staged(staged)
    [done] = await world.finish()
    assert "in use by 1 running" in str(staged.error)
    assert set(done.policy_versions.tolist()) == {0}
    assert world.loop.statistics.policy_version == 0


async def test_interrupted_requests_go_back_with_what_they_have_even_those_that_never_ran() -> None:
    world = World(SimulatedEngine(slots=2))
    running, late = world.ask("running", 9), None
    for _ in range(3):
        await world.iterate()
    late = world.ask("late", 9)
    await let_others_run()
    handed_back: Waiter[int] = Waiter.on_current_loop()
    world.inbox.put_interruption(Interruption(handed_back, frozenset(["running", "late"])))
    await world.finish()
    assert await handed_back.future == 2
    assert [task.result().finish_reason for task in (running, late)] == [FinishReason.ABORTED] * 2
    assert [task.result().num_tokens for task in (running, late)] == [3, 0]
