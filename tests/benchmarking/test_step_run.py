"""What `benchmarks/step_run.py` adds up is of the same steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.benchmark_programs import benchmark

composed_run = benchmark("composed_run")
step_run = benchmark("step_run")


def test_phases_come_to_the_total_where_one_step_has_nearly_all_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read_s, score_s = [9.0, 9.0, 0.1, 0.1, 5.0, 0.1], 0.2
    cpu_s: Iterator[float] = iter([9.0, 18.0, 18.3, 18.6, 23.8, 24.1])
    monkeypatch.setattr(composed_run.time, "process_time", lambda: next(cpu_s))
    marks = composed_run.Marks(step_run.WARM_STEPS)
    for of_step in read_s:
        marks.add(step_run.ROLLOUTS)
        marks.metrics.append(
            {"phase/read/cpu_s": of_step, "phase/score/cpu_s": score_s, "training/step_s": 1.0},
        )
    total_s = marks.cpu_s_per_rollout * step_run.ROLLOUTS
    rows = {row.phase: row.cpu_s for row in step_run.phase_rows("case", marks.counted, total_s)}
    assert total_s == pytest.approx(6.1 / 4)
    assert rows["read"] == pytest.approx(5.3 / 4)
    assert rows["score"] == pytest.approx(0.2)
    assert rows["everything else"] == pytest.approx(0.0)


def test_other_runs_count_from_the_end_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s: Iterator[float] = iter([5.0, 6.0, 7.0])
    monkeypatch.setattr(composed_run.time, "process_time", lambda: next(cpu_s))
    marks = composed_run.Marks()
    for _ in range(3):
        marks.add(4)
    assert marks.cpu_s_per_rollout == pytest.approx(0.25)
