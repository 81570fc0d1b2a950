"""In virtual time, where a deadlock is an error and not a wait: no pattern of anything stops the scheduler."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.records import TerminalState
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import World, make_world

FATES = [0.0, 1.0, 1.0, 0.0, "timeout", "environment_failed"]

PATTERNS = st.fixed_dictionaries(
    {
        "fates": st.lists(st.sampled_from(FATES), min_size=1, max_size=40),
        "pauses": st.lists(st.integers(0, 40), min_size=1, max_size=11),
        "group_size": st.integers(2, 5),
        "max_staleness": st.integers(0, 4),
        "max_running": st.integers(1, 20),
        "max_retries": st.integers(0, 2),
        "min_group_size": st.integers(1, 5),
        "buffer_batches": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "on_stale": st.sampled_from(["mask", "wait", "restart", "drop"]),
        "max_restarts": st.integers(0, 2),
        "over_sampling": st.sampled_from([1.0, 1.0, 1.5, 2.0, 4.0]),
        "on_straggler": st.sampled_from(["continue", "requeue", "resume_next_step", "drop"]),
        "group_release": st.sampled_from(["together", "early"]),
        "min_known_siblings": st.sampled_from([None, 1, 2, 3]),
        "partial_groups": st.sampled_from(["keep", "drop"]),
        "skipped": st.sets(st.integers(1, 8), max_size=3),
        "train_s": st.sampled_from([0.0, 1.0, 10.0, 100.0]),
        "install_s": st.sampled_from([0.0, 0.5, 15.0]),
        "lag_s": st.sampled_from([0.0, 0.5, 15.0]),
    }
)


@given(pattern=PATTERNS)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_pattern_of_anything_deadlocks_or_cuts_a_batch_short_and_books_balance(
    pattern: dict[str, object],
) -> None:
    async def run() -> None:
        world = patterned_world(**pattern)  # type: ignore[arg-type]
        await world.run()
        ledger = world.scheduler.ledger
        ledger.check()
        assert ledger.in_flight == 0
        statistics = world.scheduler.statistics
        assert (statistics.running, statistics.waiting_groups, statistics.batches_ahead) == (0, 0, 0)
        assert statistics.budget_free == world.ceiling
        assert ledger.total(TerminalState.TRAINED) == world.recorder.ended[TerminalState.TRAINED]
        assert world.runner.live == 0
        counts_for = 1 if pattern["group_release"] == "early" else world.batch_size // 2
        sizes = [len(formed.groups) * counts_for for formed in world.recorder.formed]
        assert all(size >= world.batch_size for size in sizes[:-1])
        assert len(asyncio.all_tasks()) == 1

    run_in_virtual_time(run())


def patterned_world(
    *,
    fates: list[str | float],
    pauses: list[int],
    skipped: set[int],
    train_s: float,
    install_s: float,
    lag_s: float,
    **chosen: object,
) -> World:
    if chosen["group_release"] == "early":  # what the settings refuse
        chosen["on_stale"] = "drop" if chosen["on_stale"] == "restart" else chosen["on_stale"]
        chosen["on_straggler"] = "drop" if chosen["on_straggler"] == "requeue" else chosen["on_straggler"]
        chosen["partial_groups"] = "keep"
    world = make_world(
        lambda number: fates[number % len(fates)],
        rows=12,
        pauses=lambda number: pauses[number % len(pauses)],
        max_barren_batches=1000,
        max_failing_s=1e9,
        **chosen,  # type: ignore[arg-type]
    )
    world.runner.pause_s, world.train_s, world.install_s, world.lag_s = 1.0, train_s, install_s, lag_s
    world.skip = lambda step: step in skipped
    return world
