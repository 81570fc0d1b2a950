"""Policies of others in `benchmarks/longtail.py` have the bounds that theirs have."""

from __future__ import annotations

from types import SimpleNamespace

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


OTHERS = [name for name, policy in longtail.POLICIES.items() if policy.whose != longtail.OWN]


@pytest.mark.parametrize("case", longtail.LOADS)
@pytest.mark.parametrize("policy", OTHERS)
def test_no_policy_of_others_is_masked_where_theirs_is_not(case: str, policy: str) -> None:
    plan = longtail.plan(case, policy, 0, steps=longtail.QUICK)
    has_bound = plan.max_staleness not in (0, longtail.NO_BOUND)
    assert not has_bound or plan.scheduling.on_stale != "mask"


def figures(groups_per_s: float, loss_tokens_per_s: float) -> list[object]:
    shares = dict.fromkeys(("wasted_share", "masked_share", "wholly_stale_share", "engine_utilization"), 0.0)
    ratios = dict.fromkeys(("length_ratio", "loss_length_ratio", "bound_ratio"), 1.0)
    rates = {"groups_per_s": groups_per_s, "loss_tokens_per_s": loss_tokens_per_s}
    return [SimpleNamespace(**shares, **ratios, **rates, staleness_mean=2.0, staleness_max=4)]


@pytest.mark.parametrize(
    ("groups_per_s", "loss_tokens_per_s", "missed"),
    [(6.0, 600.0, None), (6.0, 400.0, "loss_speedup"), (4.0, 600.0, "speedup_vs_sync")],
)
def test_groups_whose_tokens_bear_no_loss_do_not_count_as_faster(
    groups_per_s: float, loss_tokens_per_s: float, missed: str | None
) -> None:
    runs = {("main", policy): figures(1.0, 100.0) for policy in longtail.POLICIES}
    own = ("main", "stream-early")
    row = longtail.row(*own, {**runs, own: figures(groups_per_s, loss_tokens_per_s)}, judged=True)
    assert (row.met, row.missed) == (missed is None, missed)
