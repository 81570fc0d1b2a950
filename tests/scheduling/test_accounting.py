from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batching.slices import drained
from tailrace.environments.rows import EmptyRows, LazyRows, Row
from tailrace.errors import AccountingError, DataError
from tailrace.records import Outcome, RolloutId, TerminalState
from tailrace.scheduling import Ledger, TaskSource, TaskStream
from tailrace.scheduling.ledger import Accounts
from tailrace.scheduling.tasks import ENCODED_AT_ONCE
from tests.scheduling.world import Recorder, environment
from tests.support.memory_peaks import at_most_at_once


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
        assert ledger.in_flight == len(in_flight)
    ended = ledger.total(TerminalState.CANCELLED)
    ledger.end_rest(Outcome.cancelled("run_ended"))
    ledger.check()
    assert (ledger.in_flight, ledger.total(TerminalState.CANCELLED)) == (0, ended + len(in_flight))
    assert ("run_ended" in ledger.reasons(TerminalState.CANCELLED)) == bool(in_flight)


def test_a_rollout_ends_exactly_once() -> None:
    ledger = Ledger()
    ledger.admit(RolloutId("a"))
    ledger.end(RolloutId("a"), Outcome.filtered("zero_spread"))
    with pytest.raises(AccountingError, match="not in flight"):
        ledger.end(RolloutId("a"), Outcome.trained(3))


def test_a_slot_of_the_budget_is_given_back_exactly_once() -> None:
    accounts = Accounts(2, Recorder())
    accounts.admit(RolloutId("a"))
    assert accounts.budget_free == 1
    accounts.lose(RolloutId("a"), Outcome.cancelled("stale"))
    with pytest.raises(AccountingError, match="not in flight"):
        accounts.lose(RolloutId("a"), Outcome.cancelled("stale"))
    assert accounts.budget_free == 2


def test_each_epoch_walks_every_task_once_in_its_own_order() -> None:
    stream = TaskStream([TaskSource(environment(rows=20))], seed=1, max_epochs=2)
    drawn = [key.index for key in iter(stream.draw, None)]
    first, second = drawn[:20], drawn[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert stream.draw() is None
    assert first == [5, 1, 11, 4, 19, 18, 3, 15, 8, 9, 2, 13, 6, 14, 16, 10, 0, 7, 17, 12]


def test_the_order_of_a_large_data_set_is_drawn_in_its_numbers_alone() -> None:
    stream = TaskStream([TaskSource(replace(environment(), train_tasks=EmptyRows(1_000_000)))], seed=1)
    with at_most_at_once(9_000_000):
        drawn = [stream.draw() or pytest.fail("endless") for _ in range(5)]
    assert [key.index for key in drawn] == [696044, 33838, 985088, 373666, 398569]


def test_environments_are_mixed_by_weight() -> None:
    sources = [TaskSource(environment("a"), weight=3), TaskSource(environment("b"), weight=1)]
    stream = TaskStream(sources, seed=0)
    drawn = [(stream.draw() or pytest.fail("endless")).environment for _ in range(40)]
    assert drawn.count("a") == 30


@given(st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_a_resumed_stream_goes_on_where_it_was(drawn: int, outstanding: set[int]) -> None:
    def fresh() -> TaskStream:
        return TaskStream([TaskSource(environment(rows=7))], seed=3)

    stream = fresh()
    keys = [stream.draw() or pytest.fail("endless") for _ in range(drawn)]
    again = [key for number, key in enumerate(keys) if number in outstanding]
    for number, key in enumerate(keys):
        if number not in outstanding:
            stream.end(key, trained=True)
    resumed = fresh()
    resumed.restore(drained(stream.state()))
    for expected in [*again, *(stream.draw() or pytest.fail("endless") for _ in range(10))]:
        assert resumed.draw() == expected


def test_a_state_encoded_in_slices_is_that_of_the_first_one_whatever_is_drawn_between_them() -> None:
    rows = 4 * ENCODED_AT_ONCE
    stream, resumed = (TaskStream([TaskSource(environment(rows=rows))], seed=3) for _ in range(2))
    keys = [stream.draw() or pytest.fail("endless") for _ in range(3 * ENCODED_AT_ONCE)]
    for key in keys[:5]:
        stream.end(key, trained=True)
    encoding, drawn_meanwhile, state = stream.state(), [], b""
    while not state:
        try:
            next(encoding)
        except StopIteration as end:
            state = end.value
        else:
            drawn_meanwhile.append(stream.draw())
    assert len(drawn_meanwhile) >= 3
    resumed.restore(state)
    assert [resumed.draw() for _ in range(len(keys) - 5 + len(drawn_meanwhile))] == [*keys[5:], *drawn_meanwhile]


@given(st.integers(0, 40), st.integers(0, 5))
def test_a_resumed_mix_keeps_its_shares(drawn: int, outstanding: int) -> None:
    def fresh() -> TaskStream:
        return TaskStream(
            [TaskSource(environment("a", rows=5), weight=3), TaskSource(environment("b", rows=7), weight=2)], seed=3
        )

    stream = fresh()
    keys = [stream.draw() or pytest.fail("endless") for _ in range(drawn)]
    again = keys[len(keys) - outstanding :]
    for key in keys[: len(keys) - outstanding]:
        stream.end(key, trained=key.index % 3 > 0)
    resumed = fresh()
    resumed.restore(drained(stream.state()))
    assert [resumed.draw() for _ in range(len(again) + 20)] == [*again, *(stream.draw() for _ in range(20))]


class SlowRows(LazyRows):
    """Remembers in which threads its rows were made, and whether two were made at once."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.overlapped = False
        self._free = threading.Lock()

    def __len__(self) -> int:
        return 100

    def _row(self, position: int) -> Row:
        self.overlapped |= not self._free.acquire(blocking=False)
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        self._free.release()
        return {"n": position}


async def test_rows_that_must_be_generated_are_made_off_the_loop_one_at_a_time() -> None:
    rows = SlowRows()
    stream = TaskStream([TaskSource(replace(environment(), train_tasks=rows))], seed=0)
    keys = [stream.draw() or pytest.fail("endless") for _ in range(10)]
    tasks = await asyncio.gather(*(stream.make(key) for key in keys))
    assert [(task.index, task["n"]) for task in tasks] == [(key.index, key.index) for key in keys]
    assert threading.get_ident() not in rows.threads
    assert not rows.overlapped


def test_a_checkpoint_of_another_number_of_tasks_is_refused_and_one_that_does_not_tell_it_is_not() -> None:
    stream = TaskStream([TaskSource(environment("a", rows=7))], seed=3)
    stream.draw()
    state = drained(stream.state())
    for rows in (6, 8):
        with pytest.raises(DataError, match=f"with 7 tasks of the environment 'a', and this run has {rows}: "):
            TaskStream([TaskSource(environment("a", rows=rows))], seed=3).restore(state)
    older = json.loads(state)
    del older["positions"]["a"]["tasks"]
    TaskStream([TaskSource(environment("a", rows=8))], seed=3).restore(json.dumps(older).encode())


def test_a_checkpoint_of_other_environments_is_refused() -> None:
    state = drained(TaskStream([TaskSource(environment("a"))], seed=0).state())
    with pytest.raises(DataError, match="same environments"):
        TaskStream([TaskSource(environment("b"))], seed=0).restore(state)
