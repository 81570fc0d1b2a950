"""Whatever happens below `generate`, what comes out of it is what an uninterrupted run gives."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.generator import Generator, ask
from tailrace.generation.engine_thread.handover import Staged, Waiter
from tailrace.generation.engine_thread.inbox import Release
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.resuming import ResumingGenerate
from tailrace.records import Branch, Completion, FinishReason, Int32Array, SamplingParams
from tests.generation.engine_support import Brake, Driver, greedy_reference, make_engine, prompts, request
from tests.generation.loop_support import World, let_others_run

PROMPTS = prompts(4, seed=2, longest=14)
MAX_TOKENS = 14


@dataclass(frozen=True)
class Interruption:
    """Before the given iteration, all requests of both replicas are stopped in one of the ways there are."""

    iteration: int
    way: str


WAYS = ("pause", "move", "preempt", "reload")
INTERRUPTIONS = st.lists(st.builds(Interruption, iteration=st.integers(0, 25), way=st.sampled_from(WAYS)), max_size=6)


async def interrupted(
    model: PreTrainedModel, interruptions: list[Interruption], slots: int, stop: int
) -> list[Completion]:
    """All prompts over two replicas, in turns; every way of stopping them at the given iterations."""
    recompute = WeightPolicy("hot_swap", "recompute")
    replicas = [World(make_engine(model, slots=slots, prefill_chunk_tokens=5, chunk_tokens=3), recompute) for _ in "ab"]
    turns = itertools.cycle(replicas)

    def choose() -> _OnWorld:
        return _OnWorld(next(turns))

    generate = ResumingGenerate(choose)
    tasks = [
        asyncio.create_task(
            generate(
                np.asarray(prompt, np.int32),
                sampling=SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=(stop,)),
                request_id=f"r{i}",
                session_id=f"r{i}",
                group_id="g",
            )
        )
        for i, prompt in enumerate(PROMPTS)
    ]
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
        world.inbox.put_release(Release(done, hold=way == "pause"))
        while not done.future.done():
            await world.iterate()
        world.inbox.resume()


class _OnWorld:
    """`Generate` by one replica."""

    def __init__(self, world: World):
        self.world = world

    async def __call__(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
    ) -> Completion:
        asked = request(request_id, prompt_token_ids.tolist(), session=session_id, group=group_id, prefix=prefix)
        return await ask(self.world.inbox, _with(asked, sampling))


def _with(asked, sampling: SamplingParams):
    return type(asked)(
        request_id=asked.request_id,
        session_id=asked.session_id,
        group_id=asked.group_id,
        prompt_token_ids=asked.prompt_token_ids,
        sampling=sampling,
        prefix=asked.prefix,
    )


def branch_of(prompt: list[int], completion: Completion) -> Branch:
    branch = Branch()
    branch.extend_context(prompt)
    branch.extend_completion(completion)
    return branch


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(INTERRUPTIONS, st.integers(1, 4), st.integers(0, 9))
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
        done = await generator(
            np.asarray(prompt, np.int32),
            sampling=SamplingParams(temperature=0, max_tokens=6),
            request_id="r",
            session_id="s",
            group_id="g",
            prefix=saved,
        )
    assert done.token_ids.tolist() == whole
    assert done.policy_versions.tolist() == [9, 9, 9, 0, 0, 0]
    assert done.logprobs[:3].tolist() == [-0.5] * 3
    branch = branch_of(prompt, done)
    assert branch.num_tokens == 4 + 6
    assert branch.loss_mask.tolist() == [False] * 4 + [True] * 6


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
        done = await generator(
            np.asarray([1, 2], np.int32),
            sampling=sampling,
            request_id="r",
            session_id="s",
            group_id="g",
            prefix=saved,
        )
        assert generator.statistics().sampled_tokens_total == 0
    assert (done.token_ids.tolist(), done.finish_reason) == ([5, 6, 7], reason)


async def test_a_caller_of_a_paused_generator_only_waits_longer() -> None:
    brake = Brake()
    async with Generator(lambda: brake.on(SimulatedEngine())) as generator:
        task = asyncio.create_task(
            generator(
                np.asarray([1, 2], np.int32),
                sampling=SamplingParams(max_tokens=400),
                request_id="r",
                session_id="s",
                group_id="g",
            )
        )
        while generator.statistics().sampled_tokens_total < 20:  # noqa: ASYNC110 - statistics have no event
            await asyncio.sleep(0.001)
        assert await generator.pause() == 1
        sampled = generator.statistics().sampled_tokens_total
        await asyncio.sleep(0.02)
        assert generator.statistics().sampled_tokens_total == sampled < 400
        assert not task.done()
        brake.let_go()
        await generator.resume()
        done = await task
        assert (done.num_tokens, done.metrics["preemptions"]) == (400, 1)
        assert generator.statistics().sampled_tokens_total == 400


async def test_a_caller_that_goes_away_during_a_pause_takes_its_request_along() -> None:
    async with Generator(SimulatedEngine) as generator:
        await generator.pause()
        task = asyncio.create_task(
            generator(
                np.asarray([1, 2], np.int32),
                sampling=SamplingParams(max_tokens=4),
                request_id="r",
                session_id="s",
                group_id="g",
            )
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await generator.resume()
        await generator.pause()
        assert generator.statistics().sampled_tokens_total == 0
