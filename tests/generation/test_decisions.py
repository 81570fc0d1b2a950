from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.generation.decisions import (
    Close,
    EngineState,
    InboxState,
    Load,
    Reset,
    Step,
    Wait,
    WeightPolicy,
    decide,
)
from tailrace.generation.engines.torch.slots import Reuse
from tailrace.generation.settings import GeneratorSettings

POLICIES = st.builds(
    WeightPolicy, update=st.sampled_from(["hot_swap", "drain"]), kv_cache=st.sampled_from(["keep", "reset_prefix"])
)
INBOXES = st.builds(
    InboxState,
    closing=st.booleans(),
    staged_version=st.none() | st.integers(0, 9),
    arrivals=st.integers(0, 3),
    aborts=st.integers(0, 3),
)
ENGINES = st.builds(EngineState, has_work=st.booleans(), is_reset=st.booleans())


def test_close_goes_before_load_before_step_before_waiting() -> None:
    everything, busy, policy = InboxState(closing=True, staged_version=3, arrivals=1), EngineState(True), WeightPolicy()
    assert decide(everything, busy, policy) == Close()
    assert decide(InboxState(staged_version=3, arrivals=1), busy, policy) == Load(3)
    assert decide(InboxState(arrivals=1), EngineState(), policy) == Step()
    assert decide(InboxState(aborts=1), EngineState(), policy) == Step()
    assert decide(InboxState(), busy, policy) == Step()
    assert decide(InboxState(), EngineState(), policy) == Wait()


def test_draining_lets_what_runs_finish_admits_nothing_and_forgets_before_it_loads() -> None:
    policy, staged = WeightPolicy("drain", "reset_prefix"), InboxState(staged_version=3, arrivals=5)
    assert decide(staged, EngineState(has_work=True), policy) == Step(admit=False)
    assert decide(staged, EngineState(), policy) == Reset()
    assert decide(staged, EngineState(is_reset=True), policy) == Load(3)


def test_recomputing_takes_running_requests_caches_away_right_before_the_load() -> None:
    policy, staged = WeightPolicy("hot_swap", "recompute"), InboxState(staged_version=3)
    assert decide(staged, EngineState(has_work=True), policy) == Reset()
    assert decide(staged, EngineState(has_work=True, is_reset=True), policy) == Load(3)


def test_a_hot_swap_under_reset_prefix_leaves_running_requests_their_cache() -> None:
    policy, staged = WeightPolicy("hot_swap", "reset_prefix"), InboxState(staged_version=3)
    assert decide(staged, EngineState(has_work=True), policy) == Load(3)
    assert decide(staged, EngineState(), policy) == Reset()


@given(INBOXES, ENGINES, POLICIES)
def test_the_loop_waits_only_when_nobody_waits_for_it(inbox: InboxState, engine: EngineState, policy) -> None:
    if isinstance(decide(inbox, engine, policy), Wait):
        assert not inbox.closing
        assert inbox.staged_version is None
        assert not engine.has_work
        assert not inbox.aborts
        assert not inbox.arrivals


@given(INBOXES, ENGINES, POLICIES)
def test_a_load_that_waits_is_reached_in_finitely_many_steps(inbox: InboxState, engine: EngineState, policy) -> None:
    """Nothing is admitted before it, so that what runs becomes less."""
    decision = decide(inbox, engine, policy)
    if inbox.staged_version is not None and not inbox.closing:
        assert decision in (Load(inbox.staged_version), Reset(), Step(admit=False))


def test_older_caches_are_for_their_own_session_under_keep_and_for_others_only_where_sharing_was_asked_for() -> None:
    for kv_cache, own, share in itertools.product(("keep", "recompute", "reset_prefix"), (True, False), (True, False)):
        reuse = Reuse(2, kv_cache, share)
        assert reuse.allows(1, own_session=own) == (kv_cache == "keep" and (own or share))
        assert reuse.allows(2, own_session=own)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weight_update": "drain"}, "no completion mixes weights"),
        ({"weight_update": "drain", "kv_cache": "keep"}, "set generator.kv_cache to recompute or reset_prefix"),
        ({"batch_invariant": True}, "older weights' cache"),
        ({"share_prefix_across_versions": True, "kv_cache": "recompute"}, "needs generator.kv_cache keep"),
    ],
)
def test_contradictions_are_refused_with_the_reason(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        GeneratorSettings(**settings)


def test_what_goes_together_is_accepted() -> None:
    assert GeneratorSettings().weights == WeightPolicy("hot_swap", "keep")
    for kv_cache in ("recompute", "reset_prefix"):
        assert GeneratorSettings(weight_update="drain", kv_cache=kv_cache).weights.update == "drain"
        assert GeneratorSettings(batch_invariant=True, kv_cache=kv_cache).batch_invariant
