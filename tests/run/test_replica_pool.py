"""The pool of generators, under whatever happens to them in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.generation.settings import GeneratorSettings
from tailrace.run.replica_pool import ReplicaPool, Standing

OWN, GUESTS = ("own-0", "own-1"), tuple(f"guest-{number}" for number in range(5))
ACTIONS = ("start", "ask", "serves", "leaves", "ended", "gives_up")


def act(pool: ReplicaPool, action: str, number: int) -> None:
    """One of the things that happen; nothing where it cannot happen now."""
    wanted = [name for name in OWN if pool.wants(name)]
    there = [name for name in pool.names if pool.standing(name) not in (Standing.FREE, Standing.GIVEN_UP)]
    if action == "start" and wanted:
        pool.begins(wanted[0])
    elif action == "ask":
        has_room = pool.present < pool.most and any(pool.standing(name) is Standing.FREE for name in GUESTS)
        assert (pool.take_in() is not None) == has_room
    elif action in ("serves", "leaves", "ended") and there:
        getattr(pool, action)(there[number % len(there)])
    elif action == "gives_up" and (idle := [name for name in OWN if pool.standing(name) is Standing.FREE]):
        pool.gives_up(idle[0])


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9))))
def test_there_are_never_more_than_may_be_and_own_ones_start_only_below_the_least(steps: list[tuple[str, int]]) -> None:
    pool = ReplicaPool(OWN, GUESTS, least=2, most=5)
    for action, number in steps:
        act(pool, action, number)
        wanted = [name for name in OWN if pool.wants(name)]
        free = [name for name in OWN if pool.standing(name) is Standing.FREE]
        assert pool.serving <= pool.present <= pool.most
        assert len(wanted) == min(len(free), max(0, pool.least - pool.present))
        assert (pool.remaining == 0) == all(
            pool.standing(name) in (Standing.FREE, Standing.GIVEN_UP)
            and (name in GUESTS or pool.standing(name) is Standing.GIVEN_UP)
            for name in pool.names
        )


def test_another_has_the_place_of_a_guest_that_is_still_leaving() -> None:
    settings = GeneratorSettings.model_validate({"replicas": {"min": 1, "max": 2}})
    pool = ReplicaPool((), settings.guest_names(0), least=1, most=2)
    for _ in range(2):
        first, other = pool.take_in(), pool.take_in()
        assert first is not None
        assert (pool.take_in(), other is None) == (None, False)
        pool.leaves(first.name)
        replacement = pool.take_in()
        assert replacement is not None
        for name in pool.names:
            if pool.standing(name) is not Standing.FREE:
                pool.ended(name)


def test_a_name_that_comes_back_is_another_life() -> None:
    pool = ReplicaPool(["own"], ["guest"], least=1, most=2)
    pool.begins("own")
    first = pool.take_in()
    assert first is not None
    pool.ended(first.name)
    second = pool.take_in()
    assert second is not None
    assert (first.name, first.life, second.name, second.life) == ("guest", 0, "guest", 1)
