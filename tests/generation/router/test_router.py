"""The router over real engines in this process, some of which are lost in the middle of their work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import EngineFailed, RequestRefused, TransportError
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.router.router import Router
from tailrace.generation.router.settings import RouterSettings
from tailrace.records import Completion, FinishReason, GenerationRequest, ModelStateDictRef, OnChunk, SamplingParams
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

PROMPT = np.asarray([3, 1, 4, 1], np.int32)
FOREVER = SamplingParams(temperature=0, max_tokens=250)


class Replica:
    """A generator as a router's client, that breaks when told to: after so many tokens, or at once."""

    def __init__(self, model, store: MemoryModelStateDictStore | None = None, brake: Brake | None = None) -> None:
        self.generator = Generator(lambda: make_engine(model, brake, chunk_tokens=2))
        self.failure: Exception | None = None
        self.breaks_after: int | None = None
        self.prefixes: list[int] = []
        self.loads: list[int] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.can_load = True
        self._store = store
        self._broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        heard = 0
        self.prefixes.append(request.prefix_tokens)

        def count(chunk: Completion) -> None:
            nonlocal heard
            if self.failure is not None:
                return
            heard += chunk.num_tokens
            if on_chunk is not None:
                on_chunk(chunk)
            if self.breaks_after is not None and heard >= self.breaks_after:
                self.fail(EngineFailed("broke"))

        work = asyncio.create_task(self.generator.generate(request, count))
        await asyncio.wait({work, self._broken}, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            work.cancel()
            raise EngineFailed(str(self.failure))
        return work.result()

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        self.loads.append(ref.version)
        await self.may_load.wait()
        if not self.can_load:
            raise TransportError("no room")
        assert self._store is not None
        store = self._store
        return await self.generator.load_model_state_dict(lambda: store.open(ref), ref.version)

    async def failed(self) -> Exception:
        return await asyncio.shield(self._broken)

    def fail(self, failure: Exception) -> None:
        if self.failure is None:
            self.failure = failure
            self._broken.set_result(failure)


class World:
    """A router, and replicas that join it."""

    def __init__(self, names: str, weights: WeightPolicy, options: dict[str, object], max_staleness: int) -> None:
        settings = RouterSettings(**options)  # type: ignore[arg-type]
        self.router = Router(list(names), settings, weights, max_staleness=max_staleness)
        self.uses: dict[str, asyncio.Task[Exception]] = {}
        self.replicas: list[Replica] = []

    async def join(self, name: str, replica: Replica) -> Replica:
        await replica.generator.ready()
        self.replicas.append(replica)
        statistics = replica.generator.statistics()
        self.uses[name] = asyncio.create_task(self.router.use(name, replica, statistics))
        await asyncio.sleep(0)
        return replica

    def ask(
        self, name: str = "r", sampling: SamplingParams = FOREVER, on_chunk: OnChunk | None = None
    ) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.router.generate(request(name, PROMPT, sampling=sampling), on_chunk))

    def publish(self, ref: ModelStateDictRef) -> asyncio.Task[int]:
        return asyncio.create_task(self.router.load_model_state_dict(ref))


@asynccontextmanager
async def world(
    names: str = "ab", weights: WeightPolicy = DEFAULT_WEIGHT_POLICY, *, max_staleness: int = 4, **options: object
) -> AsyncIterator[World]:
    made = World(names, weights, options, max_staleness)
    try:
        yield made
    finally:
        made.router.fail(EngineFailed("the test is over"))
        await asyncio.gather(*made.uses.values(), return_exceptions=True)
        for replica in made.replicas:
            await replica.generator.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=st.lists(st.integers(1, 30), max_size=3), tokens=st.integers(1, 40))
def test_wherever_replicas_are_lost_a_completion_is_the_uninterrupted_one(
    model, breaks: list[int], tokens: int
) -> None:
    asyncio.run(_interrupted(model, breaks, tokens))


async def _interrupted(model, breaks: list[int], tokens: int) -> None:
    names = "abcd"[: len(breaks) + 1]
    async with world(names) as here:
        for name, after in zip(names, [*breaks, None], strict=True):
            (await here.join(name, Replica(model))).breaks_after = after
        heard: list[Completion] = []
        done = await here.ask(sampling=SamplingParams(temperature=0, max_tokens=tokens), on_chunk=heard.append)
        assert_told(heard, done)
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT.tolist(), tokens)
        expected = forward_logprobs(model, PROMPT.tolist(), done.token_ids)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
        assert done.policy_versions.tolist() == [0] * tokens
        assert done.finish_reason is FinishReason.LENGTH


async def test_versions_are_kept_across_the_seam(model) -> None:
    store = MemoryModelStateDictStore()
    async with world() as here:
        first = await here.join("a", Replica(model, store))
        await here.publish(store.publish(model.state_dict(), 1))
        first.breaks_after = 6
        call = here.ask()
        await until(here.uses["a"].done)
        second = await here.join("b", Replica(model, store))
        await here.publish(store.publish(model.state_dict(), 2))
        done = await call
        assert second.prefixes == [6]
        assert done.policy_versions.tolist() == [1] * 6 + [2] * 244


async def test_a_call_waits_for_a_replica_and_fails_at_once_when_none_will_come(model) -> None:
    async with world() as here:
        call = here.ask()
        await asyncio.sleep(0.01)
        assert not call.done()
        here.router.fail(EngineFailed("all of them left"))
        with pytest.raises(EngineFailed, match="all of them left"):
            await asyncio.wait_for(call, 20)
        with pytest.raises(EngineFailed, match="all of them left"):
            await asyncio.wait_for(here.ask(), 20)


async def test_a_request_under_which_generators_die_is_refused_and_others_go_on(model) -> None:
    async with world("abc", max_failovers=1) as here:
        for name in "ab":
            (await here.join(name, Replica(model))).breaks_after = 2
        with pytest.raises(RequestRefused, match="request r was running on 2 generators as they failed"):
            await here.ask()
        await here.join("c", Replica(model))
        assert (await here.ask("other")).num_tokens == 250


async def test_a_replica_joins_with_the_current_version_and_takes_nothing_before(model) -> None:
    store, newer = MemoryModelStateDictStore(), make_model(seed=1)
    async with world() as here:
        replica = Replica(model, store)
        loading = here.publish(store.publish(newer.state_dict(), 7))
        replica.may_load.clear()
        await here.join("a", replica)
        call = here.ask(sampling=SamplingParams(max_tokens=4))
        await until(lambda: replica.loads == [7])
        assert replica.prefixes == []
        replica.may_load.set()
        assert (await call).policy_versions.tolist() == [7] * 4
        assert await loading == 7


async def test_a_replica_starved_of_weights_takes_no_new_requests_and_is_given_up_by_its_deadline(model) -> None:
    store = MemoryModelStateDictStore()
    async with world(max_staleness=2, starved_deadline_s=2.0, loading_share=1.0) as here:
        failing, quick = [await here.join(name, Replica(model, store)) for name in "ab"]
        await here.publish(store.publish(model.state_dict(), 0))
        failing.can_load = False
        for version in (1, 2):
            here.publish(store.publish(model.state_dict(), version))
        await until(lambda: here.router.replicas[1].version == 2)
        assert [replica.serving for replica in here.router.replicas] == [False, True]
        for number in range(6):
            assert (await here.ask(str(number), SamplingParams(max_tokens=2))).num_tokens == 2
        assert (len(failing.prefixes), len(quick.prefixes)) == (0, 6)
        told = str(await asyncio.wait_for(here.uses["a"], 20))
        assert "a is starved of weights: its version 0 trails the trainer's" in told
        assert told.endswith("the last one of version 2: no room")


async def test_replicas_of_a_run_that_begins_serve_version_0_until_the_first_weights_can_be_installed(model) -> None:
    store = MemoryModelStateDictStore()
    async with world("a", WeightPolicy(attempts=2, backoff_s=0.001), max_staleness=2) as here:
        replica = await here.join("a", Replica(model, store))
        replica.can_load = False
        here.publish(store.publish(model.state_dict(), 1))
        await until(lambda: len(replica.loads) > 4)
        assert (await here.ask(sampling=SamplingParams(max_tokens=2))).policy_versions.tolist() == [0, 0]
        here.publish(store.publish(model.state_dict(), 2))
        await until(lambda: replica.loads[-1] == 2)
        assert not here.router.replicas[0].serving
        replica.can_load = True
        assert (await here.ask(sampling=SamplingParams(max_tokens=2))).policy_versions.tolist() == [2, 2]


async def test_weights_roll_over_the_replicas_a_share_at_a_time(model) -> None:
    store = MemoryModelStateDictStore()
    async with world("abcd", loading_share=0.5) as here:
        replicas = [await here.join(name, Replica(model, store)) for name in "abcd"]
        for replica in replicas:
            replica.may_load.clear()
        loading = here.publish(store.publish(model.state_dict(), 1))
        await until(lambda: sum(map(len, (replica.loads for replica in replicas))) == 2)
        await asyncio.sleep(0.02)
        assert sorted(len(replica.loads) for replica in replicas) == [0, 0, 1, 1]
        newest = here.publish(store.publish(model.state_dict(), 2))
        for replica in replicas:
            replica.may_load.set()
        assert (await newest, await loading) == (2, 2)
        assert sorted(map(tuple, (replica.loads for replica in replicas)))[-1] == (2,)


async def test_figures_tell_failovers_and_what_runs(model) -> None:
    async with world() as here:
        (await here.join("a", Replica(model))).breaks_after = 4
        call = here.ask()
        await until(here.uses["a"].done)
        assert here.router.replicas[0].failovers == 1
        brake = Brake()
        await here.join("b", Replica(model, brake=brake))
        await until(lambda: here.router.replicas[1].requests == 1)
        brake.let_go()
        assert (await call).num_tokens == 250
        assert [replica.requests for replica in here.router.replicas] == [0, 0]
