"""What the router does for one of many replicas does not grow with the others, and they wait for their turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from types import FrameType

import numpy as np
import pytest

from tailrace.errors import EngineFailed, TransportError
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.router.replica import Replica, ReplicaClient
from tailrace.generation.router.router import Router
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.router.weights import WeightDistributor
from tailrace.records import Completion, GenerationRequest, ModelStateDictRef, OnChunk
from tailrace.simulation.virtual_time import run_in_virtual_time

STATISTICS = EngineStatistics(
    policy_version=0, running=0, waiting=0, running_tokens=0, kv_tokens=0, kv_capacity_tokens=1
)
FEW, MANY = 32, 256


class Loading(ReplicaClient):
    """Loads weights for a while, each replica for another while; fails as often as told, at once."""

    def __init__(self, load_s: float, failing: int = 0) -> None:
        self.load_s, self.loads, self._failing = load_s, 0, failing
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def failure(self) -> Exception | None:
        return self._failed.result() if self._failed.done() else None

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        raise AssertionError("nothing is asked")

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        self.loads += 1
        if self.loads <= self._failing:
            raise TransportError("lost")
        await asyncio.sleep(self.load_s)
        return ref.version

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        return 0

    async def failed(self) -> Exception:
        return await asyncio.shield(self._failed)

    def fail(self, failure: Exception) -> None:
        self._failed.set_result(failure)


def in_any_order(number: int, replicas: int) -> float:
    return 1 + (7 * number) % replicas / replicas


def newest_first(number: int, replicas: int) -> float:
    return 2 - number / replicas


@contextlib.asynccontextmanager
async def routed(
    clients: list[Loading],
    policy: WeightPolicy = DEFAULT_WEIGHT_POLICY,
    *,
    loading_share: float = 1,
    max_staleness: int = 4,
) -> AsyncIterator[tuple[Router, list[str]]]:
    """A router that uses them, all of which may load at once unless told otherwise, and their names."""
    names = [f"generator-{number}" for number in range(len(clients))]
    router = Router(names, RouterSettings(loading_share=loading_share), policy, max_staleness=max_staleness)
    uses = [asyncio.create_task(router.use(*one, STATISTICS)) for one in zip(names, clients, strict=True)]
    await asyncio.sleep(1)
    yield router, names
    for use in uses:
        use.cancel()
    await asyncio.gather(*uses, return_exceptions=True)


async def calls_per_replica(replicas: int, versions: int, load_s: Callable[[int, int], float]) -> float:
    """Of Python functions, for each version and replica, reports included."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    async with routed([Loading(load_s(number, replicas)) for number in range(replicas)]) as (router, names):
        sys.setprofile(count)
        try:
            for version in range(1, versions + 1):
                await router.load_model_state_dict(published(version))
                for name in names:
                    router.report(name, STATISTICS, 0)
        finally:
            sys.setprofile(None)
    return calls / replicas / versions


def published(version: int) -> ModelStateDictRef:
    return ModelStateDictRef(version=version, uri="", num_bytes=0)


async def loads_begun_by_turn(replicas: int) -> list[int]:
    """In each turn of the event loop after new weights were published."""
    clients = [Loading(load_s=1.0) for _ in range(replicas)]
    async with routed(clients) as (router, _):
        begun = [0]
        loaded = asyncio.create_task(router.load_model_state_dict(published(1)))
        while begun[-1] < replicas:
            await asyncio.sleep(0)
            begun.append(sum(client.loads for client in clients))
        await loaded
    return np.diff(begun).tolist()


async def given_up_while_they_load(policy: WeightPolicy, replicas: int, load_s: float, failing: int) -> list[int]:
    """Of many that load one by one, where `starved_deadline_s` is 120 s, and first loads fail."""
    clients = [Loading(load_s, failing) for _ in range(replicas)]
    async with routed(clients, policy, loading_share=1 / replicas, max_staleness=1) as (router, _):
        async with asyncio.timeout(2 * load_s * replicas):
            await router.load_model_state_dict(published(1))
        return [number for number, client in enumerate(clients) if client.failure is not None]


@pytest.mark.parametrize("policy", [DEFAULT_WEIGHT_POLICY, WeightPolicy("drain", "reset_prefix")])
@pytest.mark.parametrize(("replicas", "load_s", "failing"), [(20, 10, 1), (130, 10, 0), (2, 150, 2)])
def test_none_is_given_up_while_it_loads_or_waits_for_its_turn(
    policy: WeightPolicy, replicas: int, load_s: float, failing: int
) -> None:
    """Neither one whose first load failed nor one that is woken some turns of the loop after the others."""
    assert run_in_virtual_time(given_up_while_they_load(policy, replicas, load_s, failing)) == []


async def given_up_after_s(load_s: float, step_s: float) -> float:
    """A replica whose loads fail, each after so long, where the trainer publishes as often as `step_s` says."""

    async def load(_: ModelStateDictRef) -> int:
        await asyncio.sleep(load_s)
        raise TransportError("no room")

    async def train() -> None:
        for version in itertools.count(1):
            weights.publish(published(version))
            await asyncio.sleep(step_s)

    weights = WeightDistributor(starved_deadline_s=120)
    training = asyncio.create_task(train())
    with pytest.raises(EngineFailed, match=r"is starved of weights.*the last one of version \d+: no room"):
        await asyncio.wait_for(weights.follow(Replica("generator-0", version=0, starved=True), load), 1000)
    training.cancel()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("step_s", [1e6, 40, 12])
@pytest.mark.parametrize("load_s", [0, 10, 30])
def test_one_is_given_up_by_what_its_failed_loads_and_the_pauses_after_them_take(load_s: float, step_s: float) -> None:
    assert 120 <= run_in_virtual_time(given_up_after_s(load_s, step_s)) <= 120 + load_s


async def given_up_without_weights(first_version: int) -> float:
    """When one is that was there before the trainer published this version, by far not too new for it."""
    clients = [Loading(1.0, failing=10_000)]
    async with routed(clients, max_staleness=8) as (router, _):
        router.weights.publish(published(first_version))
        began_s = asyncio.get_running_loop().time()
        error = await asyncio.wait_for(clients[0].failed(), 1000)
        assert "its version 0 trails the trainer's" in str(error)
        return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("first_version", [1, 7])
def test_one_that_can_load_no_weights_at_all_is_given_up_as_if_it_were_starved(first_version: int) -> None:
    """A run that is resumed begins once its weights serve."""
    assert run_in_virtual_time(given_up_without_weights(first_version)) == pytest.approx(120)


async def serving_at_steps(
    *, joins_at: int, load_s: float, late_s: float | None = None, loading_share: float
) -> list[tuple[bool, bool]]:
    """Whether a quick replica and a slow one take requests at the end of each step of the trainer, of a second.

    The slow one loads for `load_s`, and once, around step 10, for `late_s`. None serves anything older than it may.
    """
    router = Router(["quick", "slow"], RouterSettings(loading_share=loading_share), max_staleness=4)
    quick, slow, serving = Loading(0.01), Loading(load_s), list[tuple[bool, bool]]()
    uses = [asyncio.create_task(router.use("quick", quick, STATISTICS))]
    for step in range(40):
        if step == joins_at:
            uses.append(asyncio.create_task(router.use("slow", slow, STATISTICS)))
        await asyncio.sleep(0)
        if step:
            router.weights.publish(published(step))
        slow.load_s = late_s if late_s is not None and step in (10, 11) else load_s
        for _ in range(100):
            await asyncio.sleep(0.01)
            for replica in router.replicas:
                if replica.serving:
                    assert step - max(0, replica.version) < 4
                    assert replica.version >= router.weights.installed_version
        serving.append((router.replicas[0].serving, router.replicas[1].serving))
    for use in uses:
        use.cancel()
    await asyncio.gather(*uses, return_exceptions=True)
    return serving


@pytest.mark.parametrize("loading_share", [0.5, 1.0])
def test_one_whose_loads_take_longer_than_a_step_serves_soon_after_it_joined(loading_share: float) -> None:
    serving = run_in_virtual_time(serving_at_steps(joins_at=10, load_s=1.2, loading_share=loading_share))
    assert serving[15:] == [(True, True)] * 25


@pytest.mark.parametrize("loading_share", [0.5, 1.0])
def test_one_whose_loads_take_longer_than_a_step_serves_again_after_a_late_one(loading_share: float) -> None:
    course = serving_at_steps(joins_at=0, load_s=1.2, late_s=6, loading_share=loading_share)
    serving = run_in_virtual_time(course)
    assert serving[:10] == [(True, True)] * 10
    assert (True, False) in serving[10:20]
    assert serving[20:] == [(True, True)] * 20


def test_one_whose_loads_never_end_in_time_holds_up_no_other_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    serving = run_in_virtual_time(serving_at_steps(joins_at=5, load_s=4.5, loading_share=0.5))
    assert serving == [(True, False)] * 40
    assert caplog.text.count("slow has loaded weights 5 times and takes no requests") == 1


@pytest.mark.parametrize("load_s", [in_any_order, newest_first])
@pytest.mark.skipif(sys.gettrace() is not None, reason="counts calls, which a debugger makes more of")
def test_new_weights_and_reports_cost_as_much_for_each_of_many_as_of_few(
    load_s: Callable[[int, int], float],
) -> None:
    few, many = (run_in_virtual_time(calls_per_replica(replicas, 3, load_s)) for replicas in (FEW, MANY))
    assert many < 1.5 * few


def test_new_weights_do_not_start_a_thousand_loads_in_one_turn_of_the_loop() -> None:
    assert max(run_in_virtual_time(loads_begun_by_turn(1024))) <= 64
