"""A run's totals are the sum of its lines, however many starts wrote them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tailrace.reporting.sinks import JsonlSink
from tailrace.reporting.totals import RunTotals, read_totals
from tailrace.tracing.background import BackgroundWriter
from tests.support.long_runs import STEPS, write_long_metrics
from tests.support.memory_peaks import at_most_at_once

LINES = [
    {
        "step": step,
        "wall_s": 2.0 * step,
        "policy/version": step - (step >= 3),
        "batch/rollouts": 4,
        "batch/loss_tokens": 10.0 * step,
        "staleness/mean": 0.5,
        "staleness/max": step,
        "reward/mean": step / 10,
        "scheduler/admitted": 6 * step,
        "rollout/failed/timeout": 1,
        "rollout/failed_share": 0.2,
        "rollout/generated_tokens": 50,
        "cpu/trainer_s": 1.5,
        "cpu/orchestrator_s": 0.5,
        "memory/trainer_rss_bytes": 1e6 * (3 - step),
        "lag/max_s": 0.1,
        "policy/skipped_steps": int(step == 3),
        **({"rollout/filtered/nonfinite": 4} if step == 3 else {"rollout/trained": 4}),
    }
    for step in (1, 2, 3, 4)
]
EVALUATION = {
    "step": 2,
    "wall_s": 5.0,
    "eval/words/reward/mean": 0.4,
    "eval/words/tasks": 16,
    "eval/words/policy_version/min": 2,
    "eval/words/policy_version/max": 3,
    "eval/coalesced": 1,
}


def test_each_metric_is_reduced_over_the_run_as_over_a_step() -> None:
    totals = RunTotals(LINES)
    assert totals.sum("rollout/generated_tokens") == 200
    assert totals.sum("cpu/") == 8.0
    assert totals.peak_rss_bytes() == {"trainer": 2_000_000}
    assert totals.max("lag/max_s") == 0.1
    assert totals.counts() == {"scheduler/admitted": 24}
    assert totals.wall_s == totals.clock_s == 8.0
    assert totals.rewards.points == [0.1, 0.2, 0.3, 0.4]


def test_what_is_drawn_of_a_long_run_is_bounded_and_of_all_its_steps() -> None:
    totals = RunTotals({**LINES[0], "step": step, "wall_s": 2.0 * step, "reward/mean": step} for step in range(1, 5001))
    for curve in (totals.rewards, totals.generation_tokens_per_s, totals.training_tokens_per_s):
        assert 512 <= len(curve.points) <= 1024
    assert (totals.rewards.first, totals.rewards.newest) == (1, 5000)
    assert totals.rewards.points[:2] == [4.5, 12.5]
    assert totals.rewards.points[-1] == 4996.5


def test_the_rate_of_training_is_of_steps_that_were_trained_and_of_no_moment_between_two_told_at_once() -> None:
    ends_s = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 5: 40.001, 6: 50.0}
    totals = RunTotals(
        {"step": step, "wall_s": wall_s, "policy/version": step, "batch/loss_tokens": 100}
        | {"policy/skipped_steps": float(step == 2)}
        for step, wall_s in ends_s.items()
    )
    assert totals.training_tokens_per_s.points == pytest.approx([10.0, 5.0, 10.0, 20.0])


def test_a_policy_that_moves_far_is_no_mismatch_while_fresh_tokens_show_that_weights_are_the_same() -> None:
    fresh, moved_far = "training/logprob_difference_fresh", {**LINES[0], "training/logprob_difference": 5.0}
    vouched = [moved_far | ({fresh: 1e-6} if step % 8 == 0 else {}) for step in range(32)]
    assert RunTotals(vouched).mismatched_steps == 0
    assert RunTotals([*vouched, moved_far]).mismatch is None
    assert RunTotals([*vouched, *[moved_far] * 3]).mismatch == "training/logprob_difference"
    assert RunTotals([*vouched, moved_far | {fresh: 0.2}]).mismatch == fresh


def test_the_last_reward_is_of_the_last_quarter_of_the_steps_by_their_rollouts() -> None:
    """In the last step's time no group of equal rewards ended: it alone would read low."""
    filtered = {"rollout/filtered/zero_spread": 12}
    lines = [{**LINES[0], "step": step, "reward/mean": 0.9, "rollout/trained": 4, **filtered} for step in range(1, 8)]
    last = {**LINES[0], "step": 8, "reward/mean": 0.6, "rollout/trained": 4}
    totals = RunTotals([*lines, last])
    assert (totals.reward_last, totals.reward_last_steps) == (pytest.approx((16 * 0.9 + 4 * 0.6) / 20), 2)
    assert (RunTotals(LINES).reward_last, RunTotals(LINES).reward_last_steps) == (pytest.approx(0.4), 1)
    assert RunTotals(lines * 10).reward_last_steps == 8
    assert (RunTotals().reward_last, RunTotals().reward_last_steps) == (None, 0)


def test_a_skipped_step_trained_nothing() -> None:
    totals = RunTotals(LINES)
    assert (totals.tokens_trained, totals.rollouts_trained) == (10 + 20 + 40, 12)
    assert (totals.staleness_mean, totals.staleness_max) == (0.5, 4)


@pytest.mark.parametrize("versions", [(1, 1, 2, 2), (1, 2, 3, 4)])
def test_which_steps_were_skipped_is_not_told_by_their_versions(versions: tuple[int, ...]) -> None:
    """A trainer outside publishes every second step; ours, started again, skips a step that had made a version."""
    totals = RunTotals({**line, "policy/version": version} for line, version in zip(LINES, versions, strict=True))
    assert (totals.tokens_trained, totals.rollouts_trained) == (10 + 20 + 40, 12)
    assert totals.ledger() == RunTotals(LINES).ledger()
    assert totals.sum("policy/skipped_steps") == 1


def test_the_ledger_of_the_lines_balances_and_knows_what_was_in_flight() -> None:
    ledger = RunTotals(LINES).ledger()
    assert ledger.balances
    assert (ledger.admitted, ledger.in_flight) == (24, 24 - 12 - 4 - 4)
    assert ledger.by_state == {"trained": 12, "failed": 4, "filtered": 4, "cancelled": 0}
    assert ledger.by_reason["filtered"] == {"nonfinite": 4}
    assert {type(state) for state in ledger.by_state} == {str}


def test_an_evaluation_tells_its_course_and_is_no_step() -> None:
    totals = RunTotals([*LINES[:2], EVALUATION])
    later = {**EVALUATION, "step": 4, "wall_s": 11.0, "eval/words/reward/mean": 0.3}
    totals.add(later)
    course = totals.evaluations["words"]
    assert (course.evaluations, course.step_last, course.reward_first) == (2, 4, 0.4)
    assert (course.reward_best, course.reward_last, course.policy_version_max) == (0.4, 0.3, 3)
    assert (totals.steps, totals.wall_s, totals.clock_s) == (2, 4.0, 11.0)


@pytest.mark.parametrize(
    "strange", [{"metric/of another version": 1.0}, {"batch/tokens": math.nan}, {"lag/max_s": None}]
)
def test_what_is_no_metric_or_no_number_is_left_out(strange: dict[str, float | None]) -> None:
    assert vars(RunTotals([*LINES, strange])) == vars(RunTotals(LINES))


def test_lines_of_a_file_are_added_one_by_one(tmp_path: Path) -> None:
    line_bytes = write_long_metrics(tmp_path / "metrics.jsonl")
    with at_most_at_once(50 * line_bytes):
        totals = read_totals(tmp_path / "metrics.jsonl")
    assert totals.clock_s == 2.0 * STEPS
    assert totals.sum("phase/part_0/wall_s") == pytest.approx(STEPS * (STEPS + 1) / 14)


def test_the_lines_of_a_file_come_to_what_they_came_to_when_they_were_written(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    sink = JsonlSink(tmp_path / "metrics.jsonl", writer)
    for line in [*LINES, EVALUATION]:
        sink.write(line)
    assert writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "wall')  # a crash
    assert vars(read_totals(tmp_path / "metrics.jsonl")) == vars(RunTotals([*LINES, EVALUATION]))


def test_no_file_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    totals = read_totals(tmp_path / "metrics.jsonl")
    assert (totals.steps, totals.ledger().admitted, totals.ratios()) == (0, 0, {})
