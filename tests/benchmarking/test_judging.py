"""What benchmarks judge is what their pages tell, and nothing where what it is held against did not run."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.batching import Packing
from tests.support.benchmark_programs import benchmark

packing = benchmark("packing")
scale = benchmark("scale")


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
