"""Policies of others in `benchmarks/longtail.py` have the bounds that theirs have."""

from __future__ import annotations

import pytest

from tests.support.benchmark_programs import benchmark

longtail = benchmark("longtail")


@pytest.mark.parametrize("case", longtail.LOADS)
@pytest.mark.parametrize("policy", ["admission", "unbounded", "over-resume", "over-continue"])
def test_those_without_a_bound_at_training_run_without_one(case: str, policy: str) -> None:
    plan = longtail.plan(case, policy, 0, steps=longtail.QUICK)
    assert plan.max_staleness == longtail.NO_BOUND


@pytest.mark.parametrize("factor", longtail.RESUMED.values)
def test_over_sampling_alone_bounds_what_waits_under_verls(factor: float) -> None:
    plan = longtail.plan("main", "over-continue", 0, steps=longtail.QUICK, chosen=factor)
    assert plan.scheduling.over_sampling == factor <= plan.scheduling.buffer_batches


def test_no_policy_of_others_is_masked_where_theirs_is_not() -> None:
    differences = {name: policy.differs or "" for name, policy in longtail.POLICIES.items()}
    assert not {name for name, text in differences.items() if "masked" in text or "no bound" in text}
