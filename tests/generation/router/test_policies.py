from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.router.policies import UNAVAILABLE, LeastLoaded, RoutingPolicy, Sticky, load_of

LOAD = st.floats(0, 3) | st.just(UNAVAILABLE)
LOADS = st.lists(LOAD, min_size=1, max_size=8)
NAMES = st.sampled_from("abcdef")


def report(**figures: int) -> EngineStatistics:
    counts = dict.fromkeys(EngineStatistics.__struct_fields__, 0)
    return EngineStatistics(**{**counts, "kv_capacity_tokens": 1000, **figures})  # type: ignore[arg-type]


@given(LOADS, NAMES, NAMES, st.sampled_from([LeastLoaded, Sticky]))
def test_a_replica_that_takes_nothing_is_never_chosen(
    loads: list[float], session: str, group: str, kind: type[RoutingPolicy]
) -> None:
    chosen = kind().choose(session, group, loads)
    if all(load == UNAVAILABLE for load in loads):
        assert chosen is None
    else:
        assert chosen is not None
        assert loads[chosen] == min(loads)


@given(st.data(), st.integers(1, 6), st.lists(st.tuples(NAMES, NAMES), max_size=40))
def test_no_request_ever_goes_to_an_overloaded_replica(
    data: st.DataObject, count: int, requests: list[tuple[str, str]]
) -> None:
    policy = Sticky(ratio=1.5, slack=0.1, remembered=3)
    for session, group in requests:
        loads = data.draw(st.lists(LOAD, min_size=count, max_size=count))
        chosen = policy.choose(session, group, loads)
        if chosen is None:
            assert min(loads) == UNAVAILABLE
        else:
            assert loads[chosen] <= min(loads) * 1.5 + 0.1


@given(st.lists(st.floats(0, 0.1), min_size=2, max_size=6), st.lists(st.floats(0, 0.1), min_size=2, max_size=6))
def test_a_session_and_its_group_stay_where_they_are_while_nothing_is_overloaded(
    first: list[float], later: list[float]
) -> None:
    count = min(len(first), len(later))
    policy = Sticky(slack=0.1)
    home = policy.choose("session", "group", first[:count])
    assert policy.choose("session", "another group", later[:count]) == home
    assert policy.choose("another session", "group", later[:count]) == home


def test_a_group_follows_its_first_session_and_an_overloaded_home_is_left_for_good() -> None:
    policy = Sticky()
    assert policy.choose("one", "group", [0.2, 0.1, 0.2]) == 1
    assert policy.choose("two", "group", [0.0, 0.1, 0.0]) == 1
    assert policy.choose("one", "group", [0.0, 0.9, 0.1]) == 0
    assert policy.choose("one", "group", [0.05, 0.0, 0.0]) == 0


def test_a_replica_that_lost_its_caches_draws_nobody_back() -> None:
    policy = Sticky()
    assert policy.choose("one", "group", [0.0, 0.1]) == 0
    policy.forget(0)
    assert policy.choose("one", "group", [0.1, 0.05]) == 1


def test_what_is_remembered_is_bounded_and_the_longest_silent_are_forgotten() -> None:
    policy = Sticky(remembered=2)
    for session in ("a", "b", "a", "c", "a", "d"):
        policy.choose(session, session, [0.0, 0.05] if session != "b" else [0.05, 0.0])
    assert policy.choose("a", "a", [0.05, 0.0]) == 0
    assert policy.choose("b", "b", [0.0, 0.05]) == 0


@given(st.integers(0, 900), st.integers(0, 900), st.integers(1, 100))
def test_load_grows_with_running_tokens_promised_tokens_cache_and_queue(running: int, cached: int, more: int) -> None:
    base = load_of(report(running=4, running_tokens=running, kv_tokens=cached), 0)
    assert load_of(report(running=4, running_tokens=running + more, kv_tokens=cached), 0) > base
    assert load_of(report(running=4, running_tokens=running, kv_tokens=cached), more) > base
    assert load_of(report(running=4, running_tokens=running, kv_tokens=cached + more), 0) > base
    assert load_of(report(running=4, waiting=more, running_tokens=running, kv_tokens=cached), 0) > base


def test_few_long_requests_weigh_more_than_many_short_ones() -> None:
    assert load_of(report(running=2, running_tokens=800), 0) > load_of(report(running=20, running_tokens=200), 0)
