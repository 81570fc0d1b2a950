"""Whatever happens below `generate`, what comes out of it is what an uninterrupted run gives."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engine_thread.handover import Staged, Waiter
from tailrace.generation.engine_thread.inbox import Interruption
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from tests.generation.engine_support import Brake, Driver, greedy_reference, make_engine, prompts, request
from tests.generation.loop_support import World, let_others_run

PROMPTS = prompts(4, seed=2, longest=14)
MAX_TOKENS = 14


@dataclass(frozen=True)
class Disturbance:
    """Before the given iteration, all requests of both replicas are stopped in one of the ways there are."""

    iteration: int
    way: str


WAYS = ("move", "preempt", "reload")
DISTURBANCES = st.lists(st.builds(Disturbance, iteration=st.integers(0, 25), way=st.sampled_from(WAYS)), max_size=6)


async def interrupted(
    model: PreTrainedModel, interruptions: list[Disturbance], slots: int, stop: int
) -> list[Completion]:
    """All prompts over two replicas, in turns; every way of stopping them at the given iterations."""
    recompute = WeightPolicy("hot_swap", "recompute")
    replicas = [World(make_engine(model, slots=slots, prefill_chunk_tokens=5, chunk_tokens=3), recompute) for _ in "ab"]
    turns = itertools.cycle(replicas)

    async def generate(asked: GenerationRequest) -> Completion:
        while True:
            completion = await next(turns).inbox.generate(asked)
            if completion.finish_reason is not FinishReason.ABORTED:
                return completion
            asked = replace(asked, prefix=completion)

    options = {"group": "g", "temperature": 0, "max_tokens": MAX_TOKENS, "stop_token_ids": (stop,)}
    tasks = [asyncio.create_task(generate(request(f"r{i}", prompt, **options))) for i, prompt in enumerate(PROMPTS)]
    iteration = 0
    while not all(task.done() for task in tasks):
        for one in interruptions:
            if one.iteration == iteration:
                for world in replicas:
                    await interrupt(world, one.way, model)
        for world in replicas:
            await world.iterate()
        iteration += 1
    return [task.result() for task in tasks]


async def interrupt(world: World, way: str, model: PreTrainedModel) -> None:
    await let_others_run()
    if way == "preempt":
        world.engine.reset_prefix_cache(preempt_running=True)
    elif way == "reload":
        world.inbox.put_staged(Staged(model.state_dict(), world.engine.statistics().policy_version + 1))
    else:
        done: Waiter[int] = Waiter.on_current_loop()
        world.inbox.put_interruption(Interruption(done))
        while not done.future.done():
            await world.iterate()


def branch_of(prompt: list[int], completion: Completion) -> Branch:
    branch = Branch()
    branch.extend_context(prompt)
    branch.extend_completion(completion)
    return branch


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DISTURBANCES, st.integers(1, 4), st.integers(0, 9))
def test_no_interruption_shows_in_tokens_lengths_masks_or_budget(model, interruptions, slots, stop_at) -> None:
    reference = greedy_reference(model, PROMPTS[1], MAX_TOKENS)
    stop = reference[stop_at]
    undisturbed = Driver(make_engine(model)).run(
        *(
            request(f"r{i}", prompt, temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=(stop,))
            for i, prompt in enumerate(PROMPTS)
        )
    )
    done = asyncio.run(interrupted(model, interruptions, slots, stop))
    for prompt, one, other in zip(PROMPTS, done, undisturbed, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        assert one.num_tokens <= MAX_TOKENS
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert (np.diff(one.policy_versions) >= 0).all() or any(i.way == "move" for i in interruptions)
        branch, expected = branch_of(prompt, one), branch_of(prompt, other)
        assert branch.token_ids.tolist() == expected.token_ids.tolist()
        assert branch.loss_mask.tolist() == expected.loss_mask.tolist()


async def test_a_prompt_of_four_three_saved_and_three_new_are_exactly_four_and_six(model) -> None:
    prompt = [1, 2, 3, 4]
    whole = greedy_reference(model, prompt, 6)
    saved = Completion(
        np.asarray(whole[:3], np.int32), np.full(3, -0.5, np.float32), np.full(3, 9, np.int32), FinishReason.ABORTED
    )
    async with Generator(lambda: make_engine(model)) as generator:
        done = await generator.generate(request("r", prompt, prefix=saved, temperature=0, max_tokens=6))
    assert done.token_ids.tolist() == whole
    assert done.policy_versions.tolist() == [9, 9, 9, 0, 0, 0]
    assert done.logprobs[:3].tolist() == [-0.5] * 3
    branch = branch_of(prompt, done)
    assert branch.num_tokens == 4 + 6
    assert branch.loss_mask.tolist() == [False] * 4 + [True] * 6


async def test_what_was_cached_of_the_prompt_is_what_the_first_part_found(model) -> None:
    prompt, brake = list(range(1, 31)), Brake()
    async with Generator(lambda: make_engine(model, brake, chunk_tokens=4)) as generator:
        await generator.generate(request("turn1", prompt[:20], session="s", max_tokens=1))
        asked, sampled = request("turn2", prompt, session="s", max_tokens=60), asyncio.Event()
        task = asyncio.create_task(generator.generate(asked, lambda _: sampled.set()))
        await sampled.wait()
        await generator.interrupt()
        part = await task
        brake.let_go()
        whole = await generator.generate(replace(asked, request_id="rest", prefix=part))
    assert 0 < part.num_tokens < whole.num_tokens
    assert [one.metrics["cached_prompt_tokens"] for one in (part, whole)] == [20, 20]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(max_tokens=3), FinishReason.LENGTH),
        (SamplingParams(max_tokens=9, stop_token_ids=(7,)), FinishReason.STOP),
    ],
)
async def test_what_was_interrupted_after_its_last_token_is_not_sampled_again(sampling, reason) -> None:
    token_ids = np.asarray([5, 6, 7], np.int32)
    saved = Completion(token_ids, np.zeros(3, np.float32), token_ids, FinishReason.ABORTED)
    async with Generator(SimulatedEngine) as generator:
        done = await generator.generate(request("r", [1, 2], session="s", group="g", prefix=saved, sampling=sampling))
        assert generator.statistics().sampled_tokens_total == 0
    assert (done.token_ids.tolist(), done.finish_reason) == ([5, 6, 7], reason)
