from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.reporting.metrics import METRICS, MetricsAccumulator, metric_spec

VALUES = st.lists(st.tuples(st.floats(-100, 100), st.floats(0.1, 10)), min_size=1, max_size=20)


def test_every_metric_is_described_and_its_name_carries_its_unit() -> None:
    for name, spec in METRICS.items():
        assert spec.name == name
        assert spec.unit
        assert spec.description.endswith(".")
        assert name.endswith("_s") == (spec.unit == "s" or spec.unit.endswith("/s"))
        assert name.endswith("_bytes") == (spec.unit == "bytes")


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="training/loss"):
        MetricsAccumulator().add("training/los", 1.0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/alphabet-sort/mean", "reward/{environment}/mean"),
        ("phase/score/wall_s", "phase/{name}/wall_s"),
        ("rollout/failed/timeout", "rollout/failed/{reason}"),
        ("memory/trainer_rss_bytes", "memory/{role}_rss_bytes"),
        ("reward/my/own:sort/mean", "reward/{environment}/mean"),
        ("reward_component/", "reward_component/{component}"),
        ("rollout/failed/two\nlines", "rollout/failed/{reason}"),
    ],
)
def test_a_family_covers_its_names(name: str, family: str) -> None:
    assert metric_spec(name).name == family


def test_a_spread_that_no_number_holds_is_infinite() -> None:
    metrics = MetricsAccumulator()
    for value in (0.0, -1.4e217):
        metrics.add("reward/std", value)
    metrics.add("reward/std", 1.4e217, weight=2)
    assert not math.isfinite(metrics.flush()["reward/std"])


def test_each_reduction_does_what_the_table_says() -> None:
    metrics = MetricsAccumulator()
    for value in (3.0, 1.0, 2.0):
        for name in ("reward/mean", "reward/std", "reward/min", "reward/max", "batch/tokens", "policy/version"):
            metrics.add(name, value)
    assert metrics.flush() == {
        "batch/tokens": 6.0,
        "policy/version": 2.0,
        "reward/max": 3.0,
        "reward/mean": 2.0,
        "reward/min": 1.0,
        "reward/std": pytest.approx(math.sqrt(2 / 3)),
    }


def test_a_flush_starts_over_and_absent_metrics_are_absent() -> None:
    metrics = MetricsAccumulator()
    metrics.add("reward/mean", 1.0)
    metrics.add("staleness/mean", 5.0, weight=0.0)
    assert metrics.flush() == {"reward/mean": 1.0}
    assert metrics.flush() == {}


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        MetricsAccumulator().add("reward/mean", 1.0, weight=-1.0)


def test_a_nan_stays_visible() -> None:
    metrics = MetricsAccumulator()
    metrics.update({"training/loss": math.nan, "training/learning_rate": 0.1})
    flushed = metrics.flush()
    assert math.isnan(flushed["training/loss"])
    assert flushed["training/learning_rate"] == 0.1


@given(VALUES)
def test_means_and_spreads_are_weighted(pairs: list[tuple[float, float]]) -> None:
    metrics = MetricsAccumulator()
    for value, weight in pairs:
        metrics.add("reward/mean", value, weight)
        metrics.add("reward/std", value, weight)
    values, weights = np.array(pairs).T
    mean = np.average(values, weights=weights)
    assert metrics.flush() == pytest.approx(
        {"reward/mean": mean, "reward/std": np.average((values - mean) ** 2, weights=weights) ** 0.5},
        rel=1e-6,
        abs=1e-5,
    )
