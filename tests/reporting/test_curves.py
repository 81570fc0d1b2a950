"""A curve covers all of a run in a bounded number of points."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.reporting.curves import Curve


@given(st.integers(1, 9000), st.integers(0, 2**32 - 1))
def test_a_curve_of_any_length_is_of_all_values_in_order(count: int, seed: int) -> None:
    values = [float(hash((seed, index)) % 1000) for index in range(count)]
    curve = Curve.of(values)
    assert len(curve.points) <= 1024
    assert (curve.first, curve.newest) == (values[0], values[-1])
    assert (curve.lowest, curve.highest) == (min(values), max(values))
    per_point = 1 << max(0, math.ceil(math.log2(count / 1024)))
    expected = [statistics.fmean(values[start : start + per_point]) for start in range(0, count, per_point)]
    assert curve.points == pytest.approx(expected)


def test_values_that_are_not_finite_are_not_drawn() -> None:
    curve = Curve.of([1.0, math.inf, 3.0, math.nan])
    assert curve.points == [1.0, 3.0]
    assert (curve.lowest, curve.highest) == (1.0, 3.0)
    assert math.isnan(curve.newest or 0.0)
