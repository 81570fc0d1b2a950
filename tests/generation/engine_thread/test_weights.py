"""How new weights take over: what each token is worth at the boundary, and what happens when they don't come."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch

from tailrace.errors import EngineFailed, GenerationError, TransportError
from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engine_thread.handover import Staged
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.records import Completion, SamplingParams
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.generation.engine_support import (
    Brake,
    forward_logprobs,
    make_engine,
    make_model,
    over_old_cache,
    prompts,
    request,
)
from tests.generation.loop_support import World

PROMPT = prompts(2)[1]


async def swapped_in_the_middle(model, newer, kv_cache: str, tokens: int = 24, before: int = 9) -> Completion:
    """One completion whose weights change after `before` tokens."""
    world = World(make_engine(model, kv_cache=kv_cache), WeightPolicy("hot_swap", kv_cache))
    world.ask("r", tokens, prompt=PROMPT)
    while world.engine.statistics().sampled_tokens_total < before:
        await world.iterate()
    world.inbox.put_staged(Staged(newer.state_dict(), 1))
    [done] = await world.finish()
    assert done.policy_versions.tolist() == [0] * before + [1] * (tokens - before)
    return done


async def test_recompute_gives_each_side_of_the_boundary_what_its_own_weights_say_of_the_whole_context(model) -> None:
    newer = make_model(seed=1)
    done = await swapped_in_the_middle(model, newer, "recompute")
    old, new = forward_logprobs(model, PROMPT, done.token_ids), forward_logprobs(newer, PROMPT, done.token_ids)
    np.testing.assert_allclose(done.logprobs[:9], old[:9], atol=1e-4)
    np.testing.assert_allclose(done.logprobs[9:], new[9:], atol=1e-4)
    assert done.metrics["mixed_cache_tokens"] == 0
    assert done.metrics["preemptions"] == 1


@pytest.mark.parametrize("kv_cache", ["keep", "reset_prefix"])
async def test_a_cache_that_is_kept_is_read_by_new_weights_and_tokens_on_it_are_counted(model, kv_cache) -> None:
    newer = make_model(seed=1)
    done = await swapped_in_the_middle(model, newer, kv_cache)
    np.testing.assert_allclose(done.logprobs[:9], forward_logprobs(model, PROMPT, done.token_ids)[:9], atol=1e-4)
    np.testing.assert_allclose(done.logprobs[9:], over_old_cache(model, newer, PROMPT, done, 9), atol=1e-4)
    assert done.metrics["mixed_cache_tokens"] == 15
    mismatch = np.abs(done.logprobs[9:] - forward_logprobs(newer, PROMPT, done.token_ids)[9:]).mean()
    assert mismatch > 1e-3  # what a trainer sees on such tokens, and on them alone


async def later_turns(model, kv_cache: str = "keep", **options: bool) -> tuple[float, float]:
    """Cached prompt tokens of the next turn of a session, and of another session of its group, under new weights."""
    world = World(make_engine(model, kv_cache=kv_cache, **options), WeightPolicy("hot_swap", kv_cache))
    world.ask("turn1", 8, prompt=range(1, 31), session="s", group="g")
    [first] = await world.finish()
    world.inbox.put_staged(Staged(model.state_dict(), 1))
    prompt = [*range(1, 31), *first.token_ids.tolist(), 5]
    [_, other, own] = [
        *await world.finish(),
        await finished(world, "other", prompt, "another"),
        await finished(world, "turn2", prompt, "s"),
    ]
    return own.metrics["cached_prompt_tokens"], other.metrics["cached_prompt_tokens"]


async def finished(world: World, name: str, prompt: list[int], session: str) -> Completion:
    task = world.ask(name, 4, prompt=prompt, session=session, group="g" if session == "another" else name)
    await world.finish()
    return task.result()


async def test_older_prefixes_are_for_their_own_session_unless_sharing_was_asked_for(model) -> None:
    assert await later_turns(model) == (37, 0)
    assert await later_turns(model, share_prefix_across_versions=True) == (37, 37)
    assert await later_turns(model, "reset_prefix") == (0, 0)
    assert await later_turns(model, "recompute") == (0, 0)


def opener(
    tensors: Mapping[str, torch.Tensor], *, failing: list[str] | None = None, gate: threading.Event | None = None
) -> Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]:
    @contextmanager
    def open_tensors() -> Iterator[Mapping[str, torch.Tensor]]:
        if gate is not None:
            assert gate.wait(30)
        if failing:
            raise TransportError(failing.pop())
        yield tensors

    return open_tensors


def generate(generator: Generator, name: str, tokens: int) -> asyncio.Task[Completion]:
    sampling = SamplingParams(max_tokens=tokens)
    prompt = np.asarray([1, 2], np.int32)
    return asyncio.create_task(generator.generate(request(name, prompt, sampling=sampling)))


async def until(generator: Generator, happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not happened():  # noqa: ASYNC110 - statistics have no event
            await asyncio.sleep(0.001)


async def test_a_load_that_fails_is_raised_and_logged_and_the_old_version_goes_on_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "tailrace")
    async with Generator(SimulatedEngine) as generator:
        with pytest.raises(TransportError, match="gone"):
            await generator.load_model_state_dict(opener({}, failing=["gone"]), 4)
        statistics = generator.statistics()
        assert (statistics.policy_version, statistics.loads_total) == (0, 0)
        assert "version 4 was not installed" in caplog.text
        assert "TransportError: gone" in caplog.text
        assert set((await generate(generator, "r", 5)).policy_versions.tolist()) == {0}
        assert await generator.load_model_state_dict(opener({}), 5) == 5
        assert generator.statistics().loads_total == 1
        assert caplog.text.count("was not installed") == 1


class Unloadable(SimulatedEngine):
    """Fails to load in a way of its own."""

    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        raise ZeroDivisionError("no scale")


async def test_an_engine_that_fails_to_load_in_a_way_of_its_own_goes_on_too() -> None:
    async with Generator(Unloadable) as generator:
        with pytest.raises(GenerationError, match="version 1 was not installed: ZeroDivisionError: no scale") as caught:
            await generator.load_model_state_dict(opener({}), 1)
        assert not isinstance(caught.value, EngineFailed)
        assert (await generate(generator, "r", 5)).num_tokens == 5


async def test_generation_goes_on_while_weights_are_being_opened() -> None:
    gate, brake = threading.Event(), Brake(after_tokens=101)
    async with Generator(lambda: brake.on(SimulatedEngine()), WeightPolicy()) as generator:
        long = generate(generator, "long", 400)
        load = asyncio.create_task(generator.load_model_state_dict(opener({}, gate=gate), 1))
        await until(generator, lambda: generator.statistics().sampled_tokens_total > 100)
        assert not load.done()
        gate.set()
        assert await load == 1
        brake.let_go()
        assert set((await long).policy_versions.tolist()) == {0, 1}


async def test_a_load_that_nobody_waits_for_any_more_is_not_installed() -> None:
    brake = Brake(after_tokens=0)
    async with Generator(lambda: brake.on(SimulatedEngine()), WeightPolicy("drain", "reset_prefix")) as generator:
        long = generate(generator, "long", 300)
        await until(generator, lambda: generator.statistics().running == 1)
        drained = asyncio.create_task(generator.load_model_state_dict(opener({}), 1))
        queued = asyncio.create_task(generator.load_model_state_dict(opener({}), 2))
        await asyncio.sleep(0.05)
        drained.cancel()
        queued.cancel()
        await asyncio.wait({drained, queued})  # else the engine may be done before the loop tells it
        brake.let_go()
        assert set((await long).policy_versions.tolist()) == {0}
        assert await generator.load_model_state_dict(opener({}), 3) == 3
        assert generator.statistics().loads_total == 1


async def test_weights_are_of_the_version_that_the_store_lent(model) -> None:
    store = MemoryModelStateDictStore()
    older = store.publish(model.state_dict(), 1)
    store.publish(model.state_dict(), 2)
    async with Generator(lambda: make_engine(model)) as generator:
        assert await generator.load_model_state_dict(lambda: store.open(older), older.version) == 2
        assert set((await generate(generator, "r", 3)).policy_versions.tolist()) == {2}


async def test_what_waits_for_weights_fails_with_the_engine() -> None:
    others, gate = threading.enumerate(), threading.Event()
    generator = Generator(SimulatedEngine)
    await generator.ready()
    loads = [asyncio.create_task(generator.load_model_state_dict(opener({}, gate=gate), version)) for version in (1, 2)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(generator.close())
    for load in loads:
        with pytest.raises(EngineFailed, match="the engine is closed"):
            await load
    gate.set()
    await closing
    assert not any(one.name.startswith("tailrace") for one in threading.enumerate() if one not in others)
