from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tailrace.errors import EngineFailed, ModelError, RequestRefused
from tailrace.generation.completions import tail
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import Completion, FinishReason
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.generation.engine_support import (
    Brake,
    assert_told,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    request,
)


def ask(generator: Generator, name: str, prompt: list[int], **sampling: object) -> asyncio.Task[Completion]:
    return asyncio.create_task(generator.generate(request(name, prompt, **sampling)))


def opener(model, opened: list[int] | None = None, version: int = 0, gate: tuple[threading.Event, ...] = ()):
    @contextmanager
    def open_tensors() -> Iterator[Mapping[str, torch.Tensor]]:
        if gate:
            begun, may_go_on = gate
            begun.set()
            assert may_go_on.wait(30)
        if opened is not None:
            opened.append(version)
        yield model.state_dict()

    return open_tensors


async def sampled(generator: Generator, count: int) -> None:
    """Wait until that many tokens were sampled."""
    while generator.statistics().sampled_tokens_total < count:  # noqa: ASYNC110 - statistics have no event
        await asyncio.sleep(0.001)


async def test_completions_come_back_whole_with_their_metrics(model) -> None:
    async with Generator(lambda: make_engine(model, chunk_tokens=4)) as generator:
        done = await asyncio.gather(
            *(ask(generator, str(i), [i + 1, 2], temperature=0, max_tokens=11) for i in range(9))
        )
        for i, completion in enumerate(done):
            assert completion.token_ids.tolist() == greedy_reference(model, [i + 1, 2], 11)
            assert {"queue_s", "time_to_first_token_s", "decode_s", "cached_prompt_tokens"} <= completion.metrics.keys()
        assert generator.statistics().sampled_tokens_total == 9 * 11
        assert generator.statistics().running == generator.statistics().waiting == 0


async def test_a_prefix_is_part_of_the_completion(model) -> None:
    async with Generator(lambda: make_engine(model)) as generator:
        whole = await ask(generator, "whole", [1, 2, 3], temperature=0, max_tokens=12)
        prefix = Completion(whole.token_ids[:5], whole.logprobs[:5], np.full(5, -3, np.int32), FinishReason.ABORTED)
        continued = await generator.generate(
            request("rest", [1, 2, 3], session="s", group="g", prefix=prefix, temperature=0, max_tokens=12)
        )
        assert continued.token_ids.tolist() == whole.token_ids.tolist()
        assert continued.policy_versions.tolist() == [-3] * 5 + [0] * 7


async def test_chunks_are_told_before_the_completion_that_holds_them(model) -> None:
    async with Generator(lambda: make_engine(model, chunk_tokens=4)) as generator:
        heard: list[Completion] = []
        done = await generator.generate(
            request("r", [1, 2, 3], session="s", group="g", temperature=0, max_tokens=11),
            on_chunk=heard.append,
        )
        assert_told(heard, done)
        assert [chunk.num_tokens for chunk in heard] == [4, 4, 3]
        running, length = FinishReason.RUNNING, FinishReason.LENGTH
        assert [chunk.finish_reason for chunk in heard] == [running, running, length]


async def test_of_a_prefix_no_chunk_is_told(model) -> None:
    async with Generator(lambda: make_engine(model, chunk_tokens=4)) as generator:
        heard: list[Completion] = []
        prefix = await ask(generator, "whole", [1, 2, 3], temperature=0, max_tokens=5)
        done = await generator.generate(
            request("rest", [1, 2, 3], prefix=prefix, temperature=0, max_tokens=11), on_chunk=heard.append
        )
        assert_told(heard, tail(done, 5))


async def test_a_listener_that_raises_fails_its_own_request_and_frees_its_slot(model) -> None:
    def raises(_: Completion) -> None:
        raise ValueError("the reader has gone")

    async with Generator(lambda: make_engine(model, chunk_tokens=2, slots=2)) as generator:
        asked = generator.generate(request("r", [1], max_tokens=250), raises)
        other = ask(generator, "other", [2], max_tokens=60)
        with pytest.raises(ValueError, match="the reader has gone"):
            await asked
        assert (await other).num_tokens == 60
        assert (await ask(generator, "next", [3], max_tokens=3)).num_tokens == 3
        assert generator.statistics().sampled_tokens_total < 250


async def test_tokens_of_newer_weights_than_were_asked_for_carry_the_newer_version(model) -> None:
    store = MemoryModelStateDictStore()
    ref = store.publish(model.state_dict(), 1)
    store.publish(model.state_dict(), 2)
    async with Generator(lambda: make_engine(model)) as generator:
        assert await generator.load_model_state_dict(lambda: store.open(ref), ref.version) == 2
        assert (await ask(generator, "r", [1], max_tokens=2)).policy_versions.tolist() == [2, 2]


async def test_weights_are_swapped_while_requests_go_on(model) -> None:
    newer, brake = make_model(seed=1), Brake()
    async with Generator(lambda: make_engine(model, brake)) as generator:
        call = ask(generator, "r", [1, 2, 3], max_tokens=200)
        await sampled(generator, 5)
        assert await generator.load_model_state_dict(opener(newer), 4) == 4
        brake.let_go()
        completion = await call
        assert set(completion.policy_versions.tolist()) == {0, 4}
        assert (np.diff(completion.policy_versions) >= 0).all()
        fresh = await ask(generator, "after", [4, 5], max_tokens=9)
        np.testing.assert_allclose(fresh.logprobs, forward_logprobs(newer, [4, 5], fresh.token_ids), atol=1e-4)


async def test_overlapping_loads_are_installed_in_turn_and_older_ones_not_at_all(model) -> None:
    opened: list[int] = []
    begun, gate = threading.Event(), threading.Event()
    async with Generator(lambda: make_engine(model)) as generator:
        first = asyncio.create_task(generator.load_model_state_dict(opener(model, opened, 1, (begun, gate)), 1))
        assert await asyncio.to_thread(begun.wait, 30)  # the thread is inside the first load
        later = [
            asyncio.create_task(generator.load_model_state_dict(opener(model, opened, version), version))
            for version in (3, 2, 4)
        ]
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(first, *later) == [1, 3, 3, 4]
        assert opened == [1, 3, 4]
        assert await generator.load_model_state_dict(opener(model, opened, 2), 2) == 4


async def test_a_failed_load_raises_to_its_caller_and_keeps_the_old_version(model) -> None:
    @contextmanager
    def broken() -> Iterator[Mapping[str, torch.Tensor]]:
        yield {"stranger": torch.zeros(1)}

    async with Generator(lambda: make_engine(model)) as generator:
        with pytest.raises(ModelError, match="stranger"):
            await generator.load_model_state_dict(broken, 5)
        done = await ask(generator, "r", [1, 2], temperature=0, max_tokens=6)
        assert done.token_ids.tolist() == greedy_reference(model, [1, 2], 6)
        assert set(done.policy_versions.tolist()) == {0}


async def test_a_refused_request_costs_only_itself(model) -> None:
    async with Generator(lambda: make_engine(model)) as generator:
        good = ask(generator, "good", [1], max_tokens=5)
        for name, prompt, sampling in (("empty", [], {}), ("long", [1] * 300, {}), ("hot", [1], {"top_p": 0.0})):
            with pytest.raises(RequestRefused, match=f"request {name}"):
                await ask(generator, name, prompt, **sampling)
        assert (await good).num_tokens == 5


async def test_a_request_id_in_use_is_refused(model) -> None:
    brake = Brake(0)
    async with Generator(lambda: make_engine(model, brake)) as generator:
        first = ask(generator, "twin", [1], max_tokens=200)
        with pytest.raises(RequestRefused, match="twin is running already"):
            await ask(generator, "twin", [2], max_tokens=3)
        brake.let_go()
        assert (await first).num_tokens == 200


async def test_cancelling_the_caller_frees_the_slot(model) -> None:
    async with Generator(lambda: make_engine(model, Brake(), slots=1)) as generator:
        long = ask(generator, "long", [1], max_tokens=250)
        await sampled(generator, 1)
        long.cancel()
        assert (await ask(generator, "next", [2], max_tokens=3)).num_tokens == 3
        with pytest.raises(asyncio.CancelledError):
            await long
        assert generator.statistics().sampled_tokens_total < 250


class CrashingEngine(TorchEngine):
    """Real until its third step."""

    def step(self):
        if self.statistics().steps_total == 2:
            raise ZeroDivisionError("the wheel came off")
        return super().step()


@pytest.mark.filterwarnings("ignore")
async def test_a_crash_fails_every_outstanding_and_every_later_call_from_the_original_error() -> None:
    generator = Generator(lambda: CrashingEngine(make_model(), slots=2))
    calls = [ask(generator, str(i), [1, 2], max_tokens=50) for i in range(5)]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineFailed)
        assert isinstance(result.__cause__, ZeroDivisionError)
        assert "the wheel came off" in str(result)
    with pytest.raises(EngineFailed, match="the wheel came off"):
        await ask(generator, "later", [1])
    with pytest.raises(EngineFailed, match="the wheel came off"):
        await generator.load_model_state_dict(opener(make_model()), 1)
    assert "the wheel came off" in str(await generator.failed())
    await generator.close()


class Stuck(TorchEngine):
    """Its step waits for a rank that died, as one does in an exchange of tensors that never ends."""

    def step(self):
        self.stepping.set()
        self.let_go.wait(60)
        return super().step()

    def watch(self, on_failure):
        self.stepping, self.let_go, self.tell = threading.Event(), threading.Event(), on_failure


async def test_an_engine_that_ends_by_itself_inside_a_step_fails_everyone_at_once(model) -> None:
    engines: list[Stuck] = []

    def build() -> Stuck:
        engines.append(Stuck(copy.deepcopy(model), slots=4))
        return engines[0]

    generator = Generator(build)
    await generator.ready()
    call = ask(generator, "r", [1, 2], max_tokens=9)
    failed = asyncio.create_task(generator.failed())
    await asyncio.to_thread(engines[0].stepping.wait)
    engines[0].tell(EngineFailed("rank 1 died"))
    async with asyncio.timeout(30):
        with pytest.raises(EngineFailed, match=r"the engine failed: .*rank 1 died"):
            await call
        assert "rank 1 died" in str(await failed)
        with pytest.raises(EngineFailed, match="rank 1 died"):
            await ask(generator, "later", [1, 2])
        await generator.close()  # although the step never ends
    engines[0].let_go.set()


async def test_an_engine_that_cannot_be_built_says_why() -> None:
    def build() -> TorchEngine:
        raise ModelError("no such model")

    generator = Generator(build)
    with pytest.raises(ModelError, match="no such model"):
        await generator.ready()
    with pytest.raises(EngineFailed, match="no such model"):
        await ask(generator, "r", [1])
    await generator.close()


async def test_closing_fails_what_is_outstanding_and_ends_the_thread(model) -> None:
    others = threading.enumerate()
    generator = Generator(lambda: make_engine(model, Brake(0)))
    await generator.ready()
    call = ask(generator, "r", [1], max_tokens=250)
    await asyncio.sleep(0)
    await generator.close()
    with pytest.raises(EngineFailed, match="closed"):
        await call
    await generator.close()
    assert not any(thread.name == "tailrace-engine" for thread in threading.enumerate() if thread not in others)


async def test_the_engine_is_built_and_stepped_in_one_thread_of_its_own(model) -> None:
    seen: list[int] = []

    class Watched(TorchEngine):
        def step(self):
            seen.append(threading.get_ident())
            return super().step()

    def build() -> TorchEngine:
        seen.append(threading.get_ident())
        return Watched(make_model())

    async with Generator(build) as generator:
        await ask(generator, "r", [1], max_tokens=3)
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()
