from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tailrace.batching import SampledGroup
from tailrace.records import Outcome, RolloutId, TerminalState
from tailrace.scheduling import Ledger, SchedulerSetup, TaskStream
from tailrace.scheduling.judging import Judge
from tailrace.scheduling.outstanding import Outstanding, ReadyGroup
from tailrace.simulation.faults import check_seed, draw_scenario, run_scenario

SEEDS = 300
PARTS = 6
"""So that test processes share the work."""


def what_breaks(seeds: Sequence[int]) -> dict[int, str]:
    return {seed: what for seed in seeds if (what := check_seed(seed)) is not None}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_fault_breaks_ledger_bound_or_progress(part: int) -> None:
    broken = what_breaks(range(part, SEEDS, PARTS))
    again = [f"python benchmarks/fault_search.py --seed {seed}  # {what}" for seed, what in broken.items()]
    assert not again, "\n".join(again)


@pytest.mark.parametrize("seed", [2949, 8518])
def test_a_resumed_run_that_has_nothing_left_to_do_ends(seed: int) -> None:
    assert check_seed(seed) is None


def test_a_seed_replays_event_for_event() -> None:
    first, second = (run_scenario(draw_scenario(11), keep_journal=True) for _ in range(2))
    assert first == second
    assert len(first[1]) > 20


def test_the_scenarios_meet_every_kind_of_end() -> None:
    states = dict.fromkeys(TerminalState, 0)
    for seed in range(12):
        _, journal = run_scenario(draw_scenario(seed), keep_journal=True)
        for state in TerminalState:
            states[state] += sum(f"{state!r}" in line for line in journal if " ended " in line)
    assert all(states[state] > 0 for state in (TerminalState.TRAINED, TerminalState.FILTERED, TerminalState.FAILED))


def test_a_budget_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = 0

    def leaky(ledger: Ledger, rollout_id: RolloutId, outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        if ended % 5:
            end(ledger, rollout_id, outcome)

    end = Ledger.end
    monkeypatch.setattr(Ledger, "end", leaky)
    assert what_breaks(range(20))


def test_a_bound_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lax(*, max_staleness: int, **more: Any) -> SchedulerSetup:
        return SchedulerSetup(max_staleness=max_staleness + 1, **more)

    monkeypatch.setattr("tailrace.simulation.run.SchedulerSetup", lax)
    assert any("versions old" in what for what in what_breaks(range(60)).values())


def test_a_batch_that_is_not_full_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "review", lambda judge, trainer_version: iter(()))
    assert any("not full" in what for what in what_breaks(range(210, 220)).values())


def test_a_task_that_ends_with_the_first_part_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_filtered(judge: Judge, ready: ReadyGroup, taken: SampledGroup) -> None:
        own(judge, ready, taken)
        if not taken.samples:
            judge._tasks.end(ready.opened.key, trained=False)

    own = Judge._end_filtered
    monkeypatch.setattr(Judge, "_end_filtered", end_filtered)
    assert any("tasks ended as trained" in what for what in what_breaks((107, 216)).values())


def test_a_task_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outstanding, "give_up", lambda outstanding, group, rollouts=1: None)
    assert any("tasks have not ended at the end" in what for what in what_breaks(range(20)).values())


def test_a_resumed_run_that_forgets_what_it_trained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskStream, "restore", lambda stream, state: None)
    assert any("trained on again" in what for what in what_breaks(range(60)).values())
