"""What benchmarks judge is what their pages tell, and nothing where what it is held against did not run."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.batching import Packing
from tests.support.benchmark_programs import benchmark

packing = benchmark("packing")
scale = benchmark("scale")
overhead = benchmark("scheduler_overhead")


def scale_row(replicas: int, cpu_s_per_rollout: float, turn_max_s: float = 0.01) -> object:
    zeros = dict.fromkeys(("rollouts_per_s", "cpu_share", "rollouts_per_core_s", "turn_p999_s", "fill_turn_max_s"), 0.0)
    return scale.Row(
        case=f"replicas-{replicas}",
        in_flight=0,
        rollouts=0,
        **zeros,
        cpu_s_per_rollout=cpu_s_per_rollout,
        turn_max_s=turn_max_s,
        peak_rss_bytes=0,
        rss_bytes_per_rollout=0.0,
        ratio=None,
        met=None,
    )


def test_replicas_are_not_judged_against_themselves() -> None:
    assert [(row.ratio, row.met) for row in scale.judged([scale_row(64, 1.0), scale_row(1024, 9.0)])] == [
        (None, None)
    ] * 2


def test_replicas_are_judged_against_the_smallest_case() -> None:
    rows = scale.judged([scale_row(8, 1.0), scale_row(64, 1.4), scale_row(256, 1.6), scale_row(1024, 1.2, 0.06)])
    assert [(row.ratio, row.met) for row in rows] == [(1.0, True), (1.4, True), (1.6, False), (1.2, False)]


@pytest.mark.parametrize("distribution", packing.DISTRIBUTIONS)
@pytest.mark.parametrize(("ranks", "met"), [(1, True), (4, False)])
def test_rows_of_packing_that_the_page_calls_missed_are_not_met(distribution: str, ranks: int, met: bool) -> None:
    lengths, plain = (
        packing.draw_lengths(distribution, packing.NUM_SAMPLES),
        Packing(packing.ROW_TOKENS, ranks, num_shapes=1),
    )
    steps = [packing.of_step(lengths, first) for first in packing.step_starts()]
    one_shape_padding = np.mean([packing.planned_rows(step, plain).padding for step in steps])
    ffd_padding = np.mean([packing.first_fit_decreasing(step) for step in steps])
    enough = packing.TARGET_TOKENS_PER_CPU_S
    assert packing.is_met(enough, one_shape_padding, ffd_padding) is met
    assert not packing.is_met(0.9 * enough, one_shape_padding, ffd_padding)


def overhead_row(case: str, cpu_s: float, lag_s: float = 0.005) -> object:
    target = overhead.TARGET_RUN_S if case.startswith("run") else overhead.TARGET_S
    return overhead.Row(case, 1024, 20_000, cpu_s, lag_s, lag_s, 0.001, None, target, None)


def test_the_cost_of_a_rollout_is_not_flat_against_itself() -> None:
    alone = overhead_row("in-flight-1024", 60e-6)
    run = overhead_row("run-1024", 140e-6)
    rows = [overhead.judged(row, [alone, run]) for row in (alone, run)]
    assert [(row.flatness, row.met) for row in rows] == [(None, None), (None, True)]


@pytest.mark.parametrize(
    ("cpu_s", "lag_s", "met"),
    [(70e-6, 0.005, True), (81e-6, 0.005, False), (70e-6, 0.02, False), (78e-6, 0.005, False)],
)
def test_the_cost_of_a_rollout_its_growth_and_the_lag_are_judged(cpu_s: float, lag_s: float, met: bool) -> None:
    row = overhead_row("in-flight-65536", cpu_s, lag_s)
    assert overhead.judged(row, [row, overhead_row("in-flight-1024", 50e-6)]).met is met


@pytest.mark.parametrize(("cpu_s", "lag_s"), [(160e-6, 0.005), (140e-6, 0.02)])
def test_a_whole_run_is_judged_alone(cpu_s: float, lag_s: float) -> None:
    row = overhead_row("run-1024", cpu_s, lag_s)
    assert overhead.judged(row, [row]).met is False
