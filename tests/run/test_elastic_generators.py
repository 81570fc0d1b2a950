"""Generators join a run and leave it, in virtual time: nothing is lost, no bound is broken, slots are followed."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import EngineFailed
from tailrace.run.replica_pool import Standing
from tailrace.simulation.replica import CHUNK_TOKENS
from tailrace.simulation.run import Simulation
from tailrace.simulation.settings import SimulationPlan
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.support.elastic_fleet import ElasticFleet, elastic, elastic_settings

Script = Callable[[ElasticFleet, Simulation], Awaitable[None]]

SLOTS = 8


def plan_of(
    least: int, steps: int, *, seed: int = 0, schedule: str = "stream", train_s: float = 20.0
) -> SimulationPlan:
    """Steps take a minute or two, with weights that take six seconds to be loaded."""
    return SimulationPlan.model_validate(
        {
            "seed": seed,
            "steps": steps,
            "warmup_steps": 0,
            "schedule": schedule,
            "engines": {"replicas": least, "slots": SLOTS, "step_base_s": 0.05, "step_per_running_s": 0.0},
            "trainer": {"train_s": train_s, "sync_s": 6.0, "sync_holds_engines": False, "sync_holds_trainer": False},
            "load": {
                "group_size": 4,
                "max_tokens": 2000,
                "lengths": {"mean_log": 6.0, "sigma": 0.8, "task_sigma": 0.4, "cap": 2000},
            },
            "scheduling": {"batch_size": 32, "row_tokens": 4096},
        }
    )


def play(
    script: Script,
    *,
    least: int = 2,
    most: int = 6,
    steps: int = 12,
    seed: int = 0,
    schedule: str = "stream",
    train_s: float = 20.0,
    machines: int | None = None,
) -> tuple[Simulation, ElasticFleet]:
    """A run while the script goes on; the ledger has balanced, and everything that was started has ended."""

    async def main() -> tuple[Simulation, ElasticFleet]:
        plan = plan_of(least, steps, seed=seed, schedule=schedule, train_s=train_s)
        make_fleet = elastic(elastic_settings(least, most), plan, machines=machines)
        simulation = Simulation(plan, make_fleet=make_fleet, watch=False)
        fleet = simulation.fleet
        assert isinstance(fleet, ElasticFleet)
        fleet.generators.follow_slots(simulation.scheduler.resize)
        if fleet.generators.may_grow:
            fleet.generators.follow_load(lambda: simulation.scheduler.statistics.running)
        scripted = asyncio.ensure_future(script(fleet, simulation))
        try:
            run = await simulation.run()
        finally:
            scripted.cancel()
            await asyncio.gather(scripted, return_exceptions=True)
        assert run.staleness_max <= plan.max_staleness
        if scripted.done() and not scripted.cancelled():
            scripted.result()
        return simulation, fleet

    return run_in_virtual_time(main())


def require_nothing_lost(simulation: Simulation, fleet: ElasticFleet) -> None:
    """No rollout failed, and no request was sampled again beyond its last chunk."""
    assert {outcome.partition("(")[0].partition(" ")[0] for outcome in simulation.observer.outcomes} <= {
        "trained",
        "cancelled",
        "filtered",
    }
    assert simulation.requests_left == 0
    for requests, tokens in fleet.redone_tokens:
        assert tokens <= requests * CHUNK_TOKENS
    generators = fleet.generators
    assert generators.joins - generators.leaves - generators.losses == generators.pool.serving


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(["stream", "one-step-off", "sync"]))
def test_whenever_replicas_join_leave_and_die_nothing_is_lost(seed: int, schedule: str) -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        chance = random.Random(seed)
        while not fleet.serving:  # noqa: ASYNC110 - before one has ever served, a second death ends the run, as it should
            await asyncio.sleep(1)
        while True:
            await asyncio.sleep(chance.uniform(0, 40))
            there = [*fleet.lives]
            match chance.choice(["join", "join", "leave", "lose"]):
                case "join":
                    fleet.join(start_s=chance.choice([0.0, 5.0, 60.0]))
                case "leave" if there:
                    fleet.leave(chance.choice(there))
                case "lose" if there:
                    fleet.lose(chance.choice(there))
            assert fleet.generators.pool.present <= 6

    require_nothing_lost(*play(script, seed=seed, schedule=schedule))


def test_one_that_dies_twice_while_it_starts_is_started_again_where_another_serves() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        for _ in range(2):
            await asyncio.sleep(15)  # of the 20 s of a start; the other one serves when this one dies again
            fleet.lose("generator-1")

    simulation, fleet = play(script)
    require_nothing_lost(simulation, fleet)
    assert (fleet.generators.joins, fleet.generators.losses) == (2, 0)


def test_one_whose_process_cannot_be_killed_is_given_up_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        while len(fleet.serving) < 2:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(1)
        fleet.held.add("generator-1")
        fleet.lose("generator-1")

    simulation, fleet = play(script)
    require_nothing_lost(simulation, fleet)
    assert fleet.generators.pool.standing("generator-1") is Standing.GIVEN_UP
    assert re.search("left: .*generator-1 died; the generator-1 cannot be killed", caplog.text)
    assert (fleet.generators.joins, fleet.generators.losses) == (2, 1)


def play_without_restarts(script: Callable[[ElasticFleet], Awaitable[None]], least: int, most: int) -> None:
    """The generators of a run that has not begun, each of which is given up as it is lost."""

    async def main() -> None:
        plan = plan_of(least, steps=1)
        settings = elastic_settings(least, most, "--generator.restart", "never")
        fleet = Simulation(plan, make_fleet=elastic(settings, plan), watch=False).fleet
        assert isinstance(fleet, ElasticFleet)
        try:
            async with asyncio.timeout(600):
                await script(fleet)
        finally:
            await fleet.generators.close()

    run_in_virtual_time(main())


def test_a_run_begins_with_those_that_are_left_where_one_is_given_up_before() -> None:
    async def script(fleet: ElasticFleet) -> None:
        fleet.stuck.add("generator-1")
        begun = asyncio.ensure_future(fleet.generators.serving())
        await asyncio.sleep(40)
        assert (fleet.serving, begun.done()) == (["generator-0"], False)
        fleet.lose("generator-1")
        await begun
        assert (fleet.serving, fleet.generators.begins_with) == (["generator-0"], 1)

    play_without_restarts(script, least=2, most=3)


def test_a_run_whose_own_are_given_up_fails_once_nobody_comes_for_the_last_place_that_is_kept() -> None:
    async def script(fleet: ElasticFleet) -> None:
        await fleet.generators.serving()
        place, watching = fleet.generators.take_in(), asyncio.ensure_future(fleet.generators.watch())
        assert place is not None
        fleet.lose("generator-0")
        await asyncio.sleep(40)
        assert not watching.done()
        fleet.generators.refuse(place)
        with pytest.raises(EngineFailed, match="generator-0 died"):
            await watching

    play_without_restarts(script, least=1, most=2)


def test_ten_join_and_leave_in_a_run_and_its_slots_follow() -> None:
    slots: list[int] = []

    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        for number in range(10):
            await asyncio.sleep(30)
            name = fleet.join()
            assert name is not None
            while name not in fleet.serving:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(1)
            await asyncio.sleep(20)
            slots.append(fleet.generators.slots)
            assert simulation.scheduler.statistics.running > 2 * SLOTS
            (fleet.leave if number % 2 else fleet.lose)(name)
            await asyncio.sleep(1)
            slots.append(fleet.generators.slots)

    simulation, fleet = play(script, steps=40)
    require_nothing_lost(simulation, fleet)
    assert slots == [3 * SLOTS, 2 * SLOTS] * 10
    generators = fleet.generators
    assert (generators.joins, generators.leaves, generators.losses) == (12, 5, 5)
    assert sum(requests > 0 for requests, _ in fleet.redone_tokens) == 5


@pytest.mark.parametrize("ending", ["leave", "lose"])
def test_one_that_goes_while_it_loads_weights_or_starts_holds_nobody_up(ending: str) -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(60)
        for start_s, wait_s in ((100.0, 10.0), (0.0, 2.0)):  # the second one loads its first weights by then
            name = fleet.join(start_s)
            assert name is not None
            await asyncio.sleep(wait_s)
            assert name not in fleet.serving
            getattr(fleet, ending)(name)
        await asyncio.sleep(0)
        while not fleet.loading:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.5)
        getattr(fleet, ending)(fleet.serving[0])

    simulation, fleet = play(script)
    require_nothing_lost(simulation, fleet)
    assert fleet.generators.joins == 3  # its own two, one of which was replaced


def test_the_run_takes_in_as_many_as_may_be_and_another_once_one_left() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(60)
        names = [fleet.join() for _ in range(5)]
        assert names == ["generator-2", "generator-3", "generator-4", "generator-5", None]
        await asyncio.sleep(60)
        assert len(fleet.serving) == 6
        fleet.leave("generator-3")
        assert fleet.join() == "generator-6"
        await asyncio.sleep(60)
        assert fleet.join() is None
        assert "generator-3" not in fleet.lives

    require_nothing_lost(*play(script, steps=30))


def test_an_own_one_is_replaced_only_below_the_least() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(60)
        guest = fleet.join()
        assert guest is not None
        await asyncio.sleep(60)
        fleet.lose("generator-0")
        await asyncio.sleep(60)
        assert fleet.serving == ["generator-1", guest]
        fleet.leave(guest)
        await asyncio.sleep(60)
        assert fleet.serving == ["generator-0", "generator-1"]

    require_nothing_lost(*play(script, steps=20))


def test_when_the_last_one_leaves_requests_wait_for_the_one_that_replaces_it() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(60)
        fleet.leave("generator-0")
        await asyncio.sleep(1)
        assert fleet.serving == []
        await asyncio.sleep(60)
        assert fleet.serving == ["generator-0"]

    simulation, fleet = play(script, least=1, most=2)
    require_nothing_lost(simulation, fleet)
    assert (fleet.generators.leaves, fleet.generators.losses) == (1, 0)


def test_a_run_on_a_cluster_asks_for_more_while_slots_are_full_and_for_no_more_than_there_are_machines_for() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(300)
        assert len(fleet.serving) == 4
        assert fleet.generators.slots == 4 * SLOTS
        fleet.machines = 6
        await asyncio.sleep(150)
        assert len(fleet.serving) == 6
        fleet.leave("generator-1")
        await asyncio.sleep(1)
        assert "generator-1" not in fleet.on_machines

    require_nothing_lost(*play(script, least=1, most=8, steps=40, machines=4))


def test_one_that_was_let_go_gives_its_machine_back_however_long_it_takes_and_though_slots_are_full() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(300)
        assert len(fleet.serving) == 3
        fleet.end_s = 30.0
        fleet.leave("generator-2")
        await asyncio.sleep(31)
        assert fleet.given_back == ["generator-2"]
        await asyncio.sleep(60)
        assert len(fleet.serving) == 3

    require_nothing_lost(*play(script, least=1, most=3, steps=30, machines=3))


def test_what_the_trainer_does_not_keep_up_with_is_let_go_with_nothing_lost() -> None:
    most = 0

    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        nonlocal most
        while True:
            await asyncio.sleep(10)
            most = max(most, len(fleet.serving))

    simulation, fleet = play(script, least=1, most=6, steps=15, train_s=200.0, machines=6)
    require_nothing_lost(simulation, fleet)
    assert most >= 4
    assert fleet.generators.pool.serving <= 2
    assert fleet.generators.losses == 0
    assert len(fleet.on_machines) == fleet.generators.pool.present


def test_a_spare_one_that_is_lost_is_replaced_and_fails_no_run_where_it_cannot_be() -> None:
    async def script(fleet: ElasticFleet, simulation: Simulation) -> None:
        await asyncio.sleep(200)
        assert len(fleet.serving) == 3
        fleet.lose("generator-2")
        await asyncio.sleep(40)
        assert len(fleet.serving) == 3
        fleet.machines = 2
        fleet.on_machines.discard("generator-2")
        fleet.lose("generator-2")
        await asyncio.sleep(60)
        assert fleet.serving == ["generator-0", "generator-1"]

    require_nothing_lost(*play(script, least=1, most=3, steps=30, machines=3))
