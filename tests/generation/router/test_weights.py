"""The distributor of weights over generators that load when they are let: newest wins, retries, late replicas."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import pytest
import torch

from tailrace.errors import EngineFailed, ModelError, TransportError
from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.router.replica import Replica
from tailrace.generation.router.weights import WeightDistributor
from tailrace.records import ModelStateDictRef
from tests.generation.engine_support import request

QUICK = WeightPolicy(attempts=3, backoff_s=0.001)


def ref(version: int) -> ModelStateDictRef:
    return ModelStateDictRef(version=version, uri="", num_bytes=0)


class Loader:
    """Loads one at a time, each once `may_load` is set; fails as often as told."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.failing: list[Exception] = []
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, published: ModelStateDictRef) -> int:
        self.loads.append(published.version)
        await self.may_load.wait()
        if self.failing:
            raise self.failing.pop(0)
        return published.version


class Listener:
    def __init__(self) -> None:
        self.installed: list[int] = []
        self.durations_s: list[float] = []
        self.not_installed: list[int] = []

    def weights_installed(self, version: int, duration_s: float) -> None:
        self.installed.append(version)
        self.durations_s.append(duration_s)

    def weights_not_installed(self, version: int) -> None:
        self.not_installed.append(version)


class World:
    """A distributor, who hears of it, and what follows it."""

    def __init__(self, policy: WeightPolicy, loads_at_once: int) -> None:
        self.weights = WeightDistributor(policy, loads_at_once=lambda replicas: loads_at_once)
        self.weights.listener = self.listener = Listener()
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, load: Callable[[ModelStateDictRef], object], version: int = 0) -> Replica:
        replica = Replica(f"replica-{len(self.tasks)}", version=version)
        self.tasks.append(asyncio.create_task(self.weights.follow(replica, load)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return replica


@asynccontextmanager
async def world(policy: WeightPolicy = QUICK, loads_at_once: int = 1) -> AsyncIterator[World]:
    made = World(policy, loads_at_once)
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_of_versions_published_while_one_loads_exactly_the_newest_is_loaded_next() -> None:
    async with world() as here:
        loader = Loader()
        loader.may_load.clear()
        await here.join(loader.load)
        here.weights.publish(ref(1))
        await until(lambda: loader.loads == [1])
        for version in (2, 4, 3):
            here.weights.publish(ref(version))
        await asyncio.sleep(0.03)
        loader.may_load.set()
        await until(lambda: here.listener.installed == [1, 4])
        await asyncio.sleep(0.01)
        assert loader.loads == [1, 4]
        assert all(0.02 < duration_s < 20 for duration_s in here.listener.durations_s)


async def test_a_load_that_fails_is_tried_again_and_succeeds_later() -> None:
    async with world() as here:
        loader = Loader()
        loader.failing = [TransportError("lost"), TransportError("lost again")]
        await here.join(loader.load)
        here.weights.publish(ref(1))
        await until(lambda: here.listener.installed == [1])
        assert loader.loads == [1, 1, 1]
        assert here.listener.not_installed == []


async def test_a_version_that_keeps_failing_counts_as_not_installed_and_is_tried_on() -> None:
    async with world() as here:
        loader = Loader()
        loader.failing = [TransportError("gone")] * 5
        replica = await here.join(loader.load)
        here.weights.publish(ref(1))
        await until(lambda: here.listener.not_installed == [1])
        assert (replica.version, here.listener.installed) == (0, [])
        await until(lambda: here.listener.installed == [1])
        assert (loader.loads, here.listener.not_installed) == ([1] * 6, [1])


async def test_newer_weights_are_tried_at_once_while_older_ones_wait_for_their_next_attempt() -> None:
    async with world(WeightPolicy(attempts=9, backoff_s=60)) as here:
        loader = Loader()
        loader.failing = [TransportError("lost")]
        await here.join(loader.load)
        here.weights.publish(ref(1))
        await until(lambda: loader.loads == [1])
        here.weights.publish(ref(2))
        await until(lambda: here.listener.installed == [2])
        assert loader.loads == [1, 2]


async def test_a_late_replica_goes_straight_to_the_newest_and_holds_up_no_other() -> None:
    async with world(loads_at_once=2) as here:
        early, late = Loader(), Loader()
        await here.join(early.load)
        for version in (1, 2):
            here.weights.publish(ref(version))
            await until(lambda version=version: here.listener.installed[-1:] == [version])
        late.may_load.clear()
        joined = await here.join(late.load, version=-1)
        here.weights.publish(ref(3))
        await until(lambda: early.loads == [1, 2, 3])
        assert (joined.version, here.weights.lowest_version) == (-1, -1)
        late.may_load.set()
        await until(lambda: here.listener.installed == [1, 2, 3])
        assert late.loads == [2, 3]


async def test_weights_serve_once_the_replica_that_trailed_is_gone() -> None:
    async with world(loads_at_once=2) as here:
        quick, slow = Loader(), Loader()
        slow.may_load.clear()
        await here.join(quick.load)
        await here.join(slow.load)
        here.weights.publish(ref(1))
        await until(lambda: quick.loads == [1])
        assert here.listener.installed == []
        here.tasks[1].cancel()
        await until(lambda: here.listener.installed == [1])


async def test_the_first_weights_of_a_replica_that_holds_none_are_tried_on_as_any_others() -> None:
    async with world() as here:
        loader = Loader()
        loader.failing = [TransportError("no room")] * 5
        replica = await here.join(loader.load, version=-1)
        here.weights.publish(ref(5))
        await until(lambda: replica.version == 5)
        assert (loader.loads, here.listener.not_installed) == ([5] * 6, [5])


async def test_a_replica_whose_first_weights_are_not_its_models_is_of_no_use() -> None:
    async with world() as here:
        loader = Loader()
        loader.failing = [ModelError("another shape")] * 3
        await here.join(loader.load, version=-1)
        here.weights.publish(ref(5))
        with pytest.raises(ModelError, match="another shape"):
            await asyncio.wait_for(here.tasks[0], 20)
        assert (loader.loads, here.listener.not_installed) == ([5] * 3, [5])


async def test_a_replica_that_is_lost_is_not_tried_again() -> None:
    async with world() as here:
        loader = Loader()
        loader.failing = [EngineFailed("died")]
        await here.join(loader.load)
        here.weights.publish(ref(1))
        with pytest.raises(EngineFailed, match="died"):
            await asyncio.wait_for(here.tasks[0], 20)
        assert loader.loads == [1]
        assert here.listener.not_installed == []


async def test_a_trainer_that_was_started_again_replaces_weights_of_the_same_version_and_never_newer_ones() -> None:
    async with world() as run:
        loader = Loader()
        replica = await run.join(loader.load)
        run.weights.publish(ref(7))
        await until(lambda: replica.version == 7)
        run.weights.trainer_restarted()
        for version in (5, 6):
            run.weights.publish(ref(version))
        assert run.weights.newest == ref(7)
        late = Loader()
        late_replica = await run.join(late.load)
        await until(lambda: late_replica.version == 7)
        run.weights.publish(ref(7))
        await until(lambda: loader.loads == [7, 7] and late.loads == [7, 7])
        run.weights.publish(ref(8))
        await until(lambda: run.listener.installed[-1] == 8)
        assert loader.loads == late.loads == [7, 7, 8]


async def test_a_drain_ends_however_many_requests_and_newer_versions_come_meanwhile() -> None:
    policy = WeightPolicy("drain", "reset_prefix")
    async with Generator(lambda: SimulatedEngine(step_s=0.002), policy) as generator, world(policy) as here:

        async def ask(max_tokens: int) -> None:
            for turn in itertools.count():
                done = await generator.generate(request(f"{max_tokens}.{turn}", [1, 2], max_tokens=max_tokens))
                assert len(set(done.policy_versions.tolist())) == 1

        async with asyncio.TaskGroup() as asking:
            asked = [asking.create_task(ask(max_tokens)) for max_tokens in (100, 110, 125, 140)]
            await until(lambda: generator.statistics().running == 4)
            await here.join(lambda published: generator.load_model_state_dict(_opened_slowly, published.version))
            for version in range(1, 300):
                here.weights.publish(ref(version))
                await asyncio.sleep(0.03)
                if len(here.listener.installed) == 3:
                    break
            for one in asked:
                one.cancel()
        assert len(here.listener.installed) == 3


@contextmanager
def _opened_slowly() -> Iterator[Mapping[str, torch.Tensor]]:
    """In longer than a step takes, so that requests are let in meanwhile."""
    time.sleep(0.01)
    yield {}
