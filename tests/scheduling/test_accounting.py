from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import AccountingError, DataError
from tailrace.records import Outcome, RolloutId, TerminalState
from tailrace.scheduling import Ledger, StalenessBudget, TaskSource, TaskStream
from tests.scheduling.world import environment


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from([None, *TerminalState]))))
def test_the_ledger_balances_whatever_happens(events: list[tuple[int, TerminalState | None]]) -> None:
    ledger = Ledger()
    in_flight: set[str] = set()
    for number, state in events:
        rollout_id = RolloutId(str(number))
        try:
            if state is None:
                ledger.admit(rollout_id)
                in_flight.add(rollout_id)
            else:
                ledger.end(rollout_id, Outcome(state, "because"))
                in_flight.remove(rollout_id)
        except AccountingError:
            assert (rollout_id in in_flight) == (state is None)
        ledger.check()
        assert set(ledger.in_flight_ids()) == in_flight


def test_a_rollout_ends_exactly_once() -> None:
    ledger = Ledger()
    ledger.admit(RolloutId("a"))
    ledger.end(RolloutId("a"), Outcome.filtered("zero_spread"))
    with pytest.raises(AccountingError, match="not in flight"):
        ledger.end(RolloutId("a"), Outcome.trained(3))


def test_a_budget_slot_is_given_back_exactly_once() -> None:
    budget = StalenessBudget(2)
    budget.acquire(["a"])
    budget.release("a")
    with pytest.raises(AccountingError, match="does not hold"):
        budget.release("a")


def test_each_epoch_walks_every_task_once_in_its_own_order() -> None:
    stream = TaskStream([TaskSource(environment(rows=20))], seed=1, max_epochs=2)
    drawn = [key.index for key, _ in iter(stream.next, None)]
    first, second = drawn[:20], drawn[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert stream.is_exhausted


def test_environments_are_mixed_by_weight() -> None:
    sources = [TaskSource(environment("a"), weight=3), TaskSource(environment("b"), weight=1)]
    stream = TaskStream(sources, seed=0)
    drawn = [key.environment for key, _ in (stream.next() or pytest.fail("endless") for _ in range(40))]
    assert drawn.count("a") == 30


@given(st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_a_resumed_stream_goes_on_where_it_was(drawn: int, outstanding: set[int]) -> None:
    def fresh() -> TaskStream:
        return TaskStream([TaskSource(environment(rows=7))], seed=3)

    stream = fresh()
    keys = [key for key, _ in (stream.next() or pytest.fail("endless") for _ in range(drawn))]
    again = [key for number, key in enumerate(keys) if number in outstanding]
    resumed = fresh()
    resumed.restore(stream.state(again))
    for expected in [*again, *(key for key, _ in (stream.next() or pytest.fail("endless") for _ in range(10)))]:
        drawn_again = resumed.next()
        assert drawn_again is not None
        assert drawn_again[0] == expected


def test_a_checkpoint_of_other_environments_is_refused() -> None:
    state = TaskStream([TaskSource(environment("a"))], seed=0).state([])
    with pytest.raises(DataError, match="same environments"):
        TaskStream([TaskSource(environment("b"))], seed=0).restore(state)
