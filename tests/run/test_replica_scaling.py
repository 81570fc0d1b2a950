"""How many generators a run on a cluster is to have, look by look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.generation.settings import ReplicaSettings
from tailrace.run.replica_scaling import ASK_AGAIN_S, Load, ReplicaScaling

SETTINGS = ReplicaSettings(min=1, max=16, grow_after_s=10, shrink_after_s=60)
SLOTS = 32


def load(rollouts: int, serving: int, on_the_way: int = 0) -> Load:
    return Load(rollouts=rollouts, slots=SLOTS * serving, serving=serving, on_the_way=on_the_way)


def changes(scaling: ReplicaScaling, seen: Load, first_s: int, looks: int) -> dict[int, int]:
    """By the second; those that are 0 left out."""
    found = {at_s: scaling.change(at_s + 0.25, seen) for at_s in range(first_s, first_s + looks)}
    return {at_s: change for at_s, change in found.items() if change}


def test_full_slots_ask_for_half_as_many_again_and_then_wait_for_them() -> None:
    scaling = ReplicaScaling(SETTINGS)
    assert changes(scaling, load(4 * SLOTS, 4), 0, 20) == {10: 2}
    assert changes(scaling, load(4 * SLOTS, 4, on_the_way=2), 20, 100) == {}
    assert changes(scaling, load(6 * SLOTS, 6), 120, 12) == {130: 3}


def test_nothing_is_decided_before_one_that_leaves_is_gone() -> None:
    scaling = ReplicaScaling(SETTINGS)
    assert changes(scaling, load(4 * SLOTS, 4), 0, 9) == {}
    assert changes(scaling, load(4 * SLOTS, 4, on_the_way=1), 9, 30) == {}
    assert changes(scaling, load(4 * SLOTS, 4), 39, 12) == {48: 2}


def test_one_alone_asks_for_one() -> None:
    assert changes(ReplicaScaling(SETTINGS), load(SLOTS, 1), 0, 12) == {10: 1}


def test_idle_slots_let_one_go_at_a_time() -> None:
    scaling = ReplicaScaling(SETTINGS)
    assert changes(scaling, load(SLOTS, 3), 0, 100) == {60: -1}
    assert changes(scaling, load(SLOTS, 2), 100, 100) == {}, "what is left of two would be full"


def test_a_cluster_without_room_is_asked_again_later() -> None:
    scaling = ReplicaScaling(SETTINGS)
    scaling.no_room(0.0)
    assert changes(scaling, load(4 * SLOTS, 4), 0, 65) == {int(ASK_AGAIN_S): 2}


def test_a_trainer_that_is_slow_has_none_added_by_the_burst_that_each_of_its_steps_lets_in() -> None:
    scaling = ReplicaScaling(SETTINGS)
    found: dict[int, int] = {}
    for step in range(5):
        found |= changes(scaling, load(2 * SLOTS, 2), 200 * step, 30) if step else {}
        found |= changes(scaling, load(SLOTS, 2), 200 * step + 30, 170)
    assert found == {}


def test_nothing_is_decided_while_none_serves() -> None:
    assert changes(ReplicaScaling(SETTINGS), load(0, 0), 0, 200) == {}


def test_the_time_in_which_none_serves_counts_for_no_idle_slots() -> None:
    scaling = ReplicaScaling(SETTINGS)
    assert changes(scaling, load(0, 0, on_the_way=1), 0, 50) == {}
    assert changes(scaling, load(SLOTS, 1), 50, 12) == {60: 1}
    assert changes(scaling, load(SLOTS, 0), 62, 10) == {}, "all are lost"
    assert changes(scaling, load(SLOTS, 1), 72, 12) == {82: 1}, "and were not full until one was back"


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 6), st.integers(1, 90)), max_size=6))
def test_it_never_grows_on_idle_slots_nor_shrinks_on_full_ones(stretches: list[tuple[int, int, int]]) -> None:
    """Each stretch has as many rollouts, and generators that serve, for so many seconds."""
    scaling, filled = ReplicaScaling(SETTINGS), list[float]()
    looks = [(rollouts, serving) for rollouts, serving, seconds in stretches for _ in range(seconds)]
    for at_s, (rollouts, serving) in enumerate(looks):
        seen = load(min(rollouts, SLOTS * serving), serving)
        filled.append(seen.filled)
        change = scaling.change(float(at_s), seen)
        if change > 0:
            assert max(filled[-11:]) >= 0.9
        if change < 0:  # what is left would not be full
            assert min(filled[-61:]) * serving <= 0.8 * (serving - 1) + 1e-9
