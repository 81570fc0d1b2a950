"""What `benchmarks/trainer.py` makes of its workers' figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import trainer, trainer_step
from benchmarks.kit import Options
from benchmarks.peers import Tuning
from benchmarks.trainer import Bench, StepRow

CASE = "small-float32-natural"
OPTIONS = Options(json=False, quick=False, cases=())


def of_lengths(*steps: list[int]) -> dict[str, Any]:
    """A job with these completions, each step's in one group, behind a short batch to warm up with."""
    batches = [
        [{"prompt": [1], "completions": [[3 + index] * length for index, length in enumerate(step)]}]
        for step in ([1], *steps)
    ]
    return {"batches": batches, "precision": "float32", "ranks": 1, "floor": True}


class StubbedBench(Bench):
    """Two steps, of which the first has twice the tokens of the second; TRL takes as long for each."""

    def job(self, case: str) -> dict[str, Any]:
        return of_lengths([60, 40], [30, 20])

    def ours(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [100, 50], "cpu_s": [2.0, 1.0], "floor_s": 1.5}

    def trl(self, job: dict[str, Any], tuning: Tuning) -> list[float]:
        return [4.0, 4.0]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(trainer, "require_peer", lambda: None)
    return StubbedBench(tmp_path, OPTIONS, sweeps=False)


@pytest.fixture
def row(bench: Bench) -> StepRow:
    return bench.step(CASE)


def test_rates_are_all_tokens_of_the_measured_steps_over_all_their_time(row: StepRow) -> None:
    assert row.tokens == 150
    assert row.tokens_per_cpu_s == pytest.approx(50)
    assert row.trl_tokens_per_cpu_s == pytest.approx(18.75)
    assert row.ratio == pytest.approx(50 / 18.75)
    assert row.mfu == pytest.approx(0.5)


def test_a_row_says_how_long_its_completions_are_and_what_trl_makes_of_them(row: StepRow) -> None:
    assert (row.mean_tokens, row.longest_tokens) == (37.5, 60)
    assert row.trl_padded_tokens == 2 * 60 + 2 * 30


def test_a_sweep_has_the_rate_of_all_steps_of_the_median_run(bench: Bench) -> None:
    rows = bench.sweep(CASE)
    assert [row.trl_tokens_per_cpu_s for row in rows] == [pytest.approx(18.75)] * len(rows)
    assert sorted({row.runs for row in rows}) == [1, 1 + trainer.FINAL_TURNS]
    assert sum(row.best for row in rows) == 1


def test_the_floor_of_several_steps_is_the_sum_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_step.Product, "measured_s", lambda product: product.flops)
    model, _ = Bench(tmp_path, OPTIONS, sweeps=False).model("small")
    job = of_lengths([60, 40], [30, 20]) | {"model": str(model)}
    batches = [trainer_step.planned_batch(groups, step, 1) for step, groups in enumerate(job["batches"][1:], start=1)]
    each = [trainer_step.floor_s(job, [batch]) for batch in batches]
    assert trainer_step.floor_s(job, batches) == pytest.approx(sum(each))
