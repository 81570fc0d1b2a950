from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.errors import DataError
from tailrace.simulation import SimulationPlan, simulate
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.settings import EmpiricalLengths, LognormalLengths, MixtureLengths, MixturePart
from tests.simulation.plans import small_plan

JOURNAL = """
import hashlib
from tailrace.simulation import simulate
from tests.simulation.plans import small_plan
print(hashlib.sha256("\\n".join(simulate(small_plan(**{changes}), keep_journal=True).journal).encode()).hexdigest())
"""


@pytest.mark.parametrize("scheduling", [{}, {"over_sampling": 1.5, "on_straggler": "resume_next_step"}])
def test_the_same_seed_gives_the_same_run_event_for_event_in_every_process(scheduling: dict[str, object]) -> None:
    here = simulate(small_plan(seed=3, scheduling=scheduling), keep_journal=True)
    elsewhere = subprocess.run(
        [sys.executable, "-c", JOURNAL.format(changes={"seed": 3, "scheduling": scheduling})],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert len(here.journal) > 300
    assert hashlib.sha256("\n".join(here.journal).encode()).hexdigest() == elsewhere.stdout.strip()
    assert simulate(small_plan(seed=4, scheduling=scheduling), keep_journal=True).journal != here.journal


def test_a_stream_trains_on_nothing_older_than_the_bound_and_beats_sync() -> None:
    stream, sync = simulate(small_plan()), simulate(small_plan(schedule="sync"))
    assert 0 < stream.staleness_mean <= stream.staleness_max <= 4
    assert sync.staleness_max == 0
    assert sync.wasted_share == sync.masked_share == 0
    assert stream.groups_per_s > 1.5 * sync.groups_per_s
    assert stream.bound_ratio <= 1.02


def test_every_token_bore_loss_was_stale_or_was_thrown_away() -> None:
    long_tail = {"lengths": {"mean_log": 4.5, "sigma": 1.5, "task_sigma": 0.5, "cap": 4096}}
    run = simulate(
        small_plan(warmup_steps=0, load=long_tail, trainer={"train_s": 3.0}, scheduling={"max_staleness": 1})
    )
    measured = run.measured
    assert measured.trained_tokens == measured.loss_tokens + measured.masked_tokens
    assert measured.ended_tokens == measured.trained_tokens + measured.wholly_stale_tokens
    assert sum(run.staleness.values()) == measured.loss_tokens
    assert run.wasted_share == run.wholly_stale_share > 0
    assert run.masked_share == pytest.approx(1 - measured.loss_tokens / measured.ended_tokens)
    assert run.outcomes["trained"] == measured.trained_rollouts == 20 * 16 - run.outcomes["filtered(stale)"]


def test_what_is_aborted_at_an_edge_is_waste() -> None:
    run = simulate(small_plan(schedule="stream", scheduling={"over_sampling": 2.0, "on_straggler": "drop"}))
    assert run.wasted_share > 0.1
    assert run.wholly_stale_share == run.masked_share == 0
    assert run.length_ratio < 0.95  # long rollouts are lost


def test_without_a_bound_nothing_is_masked_or_wasted() -> None:
    run = simulate(small_plan(scheduling={"max_staleness": 10_000}))
    assert run.wasted_share == run.masked_share == 0
    assert run.loss_length_ratio == run.length_ratio


def test_a_trainer_that_is_faster_than_the_engines_waits_for_them() -> None:
    alike = {"mean_log": 4.5, "sigma": 0.0, "task_sigma": 0.0}  # the bound knows mean lengths, not those that are drawn
    run = simulate(small_plan(trainer={"train_s": 0.5, "sync_s": 0.1}, load={"lengths": alike}))
    assert run.trainer_utilization < 0.7
    assert run.engine_utilization > 0.8
    assert run.bound_ratio == pytest.approx(1, abs=0.02)


def test_turns_and_environments_take_their_time() -> None:
    steps = {"steps": 6, "warmup_steps": 0, "schedule": "sync"}  # nothing is in flight as a step ends
    quick = simulate(small_plan(**steps, load={"turns": 2}))
    slow = simulate(small_plan(**steps, load={"turns": 2, "environment_s": 100.0}))
    assert quick.measured.asked_completions == 2 * quick.measured.trained_rollouts == 2 * 6 * 16
    assert slow.measured.time_s - quick.measured.time_s > 6 * 2 * 100  # each step waits for the slowest of its rollouts


def test_rewards_that_pass_or_fail_leave_some_groups_without_spread() -> None:
    run = simulate(small_plan(load={"pass_share": 0.5}))
    assert run.outcomes["filtered(zero_spread)"] > 0
    assert run.outcomes["filtered(zero_spread)"] % 4 == 0


def test_the_mean_length_of_a_load_is_what_its_draws_come_to(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20\n60\n")
    tail = LognormalLengths(mean_log=9.7, sigma=0.0, task_sigma=0.0)
    for settings in (
        LognormalLengths(mean_log=5.0, sigma=1.0, task_sigma=0.6, cap=400),
        MixtureLengths(parts=(MixturePart(weight=9, lengths=LognormalLengths()), MixturePart(weight=1, lengths=tail))),
        EmpiricalLengths(file=file),
    ):
        source = LengthSource(settings, seed=1)
        drawn = [source.draw(f"task{number // 2}", f"{number}") for number in range(20_000)]
        assert sum(drawn) / len(drawn) == pytest.approx(source.mean, rel=0.03)


def test_rollouts_of_one_task_share_what_makes_them_long() -> None:
    source = LengthSource(LognormalLengths(sigma=1.0, task_sigma=1.0), seed=0)
    assert len({source.draw("task", str(number)) for number in range(5)}) == 1
    assert source.draw("another", "0") != source.draw("task", "0")


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("ten\n")
    with pytest.raises(DataError, match="one length in tokens a line"):
        LengthSource(EmpiricalLengths(file=file), seed=0)


def test_an_impossible_plan_is_refused() -> None:
    with pytest.raises(ValidationError, match="row_tokens"):
        SimulationPlan.model_validate({"scheduling": {"batch_size": 64, "row_tokens": 4096}})
    with pytest.raises(ValidationError, match="task_sigma"):
        LognormalLengths(sigma=0.5, task_sigma=0.7)
