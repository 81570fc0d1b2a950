from __future__ import annotations

import re

import pytest

from tailrace.config.reference import settings_reference
from tailrace.reporting.advice import HISTORY, RULES, Advice, advice
from tailrace.reporting.metrics import metric_spec

SOUND = {
    "policy/version": 1.0,
    "reward/mean": 0.6,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "group/zero_spread_share": 0.2,
    "rollout/trained": 64.0,
    "rollout/filtered/zero_spread": 16.0,
    "training/entropy": 0.4,
    "rollout/completion_tokens": 100.0,
    "rollout/truncated_share": 0.0,
    "rollout/failed_share": 0.0,
    "batch/tokens": 1000.0,
    "batch/masked_tokens": 0.0,
    "bias/masked_share": 0.2,  # of the whole run, whatever its newest steps are like
    "scheduler/trainer_wait_s": 0.1,
    "scheduler/buffer_wait_s": 0.1,
    "lag/max_s": 0.4,  # a core that others have is none of the run's faults
    "lag/held_max_s": 0.01,
    "training/logprob_difference_fresh": 1e-6,
    "training/effective_sample_share": 0.98,
}


def lines(
    changed: dict[str, float] | None = None, *, count: int = HISTORY, for_steps: int = 5
) -> list[dict[str, float]]:
    """A sound run whose last few steps are otherwise."""
    made = [{**SOUND, "step": float(step), "wall_s": 2.0 * step} for step in range(count)]
    for line in made[-for_steps:]:
        line.update(changed or {})
    return made


SICK = {
    "no_spread": {"group/zero_spread_share": 0.9, "rollout/filtered/zero_spread": 576.0, "reward/mean": 0.02},
    "entropy_collapse": {"training/entropy": 0.001},
    "engine_drift": {"training/logprob_difference_fresh": 0.2},
    "weak_weights": {"training/effective_sample_share": 0.3},
    "failing_environment": {"rollout/failed_share": 0.4, "environment/sort/failed/timeout": 9.0},
    "length_drift": {"rollout/completion_tokens": 400.0},
    "truncated": {"rollout/truncated_share": 0.5},
    "masked": {"batch/masked_tokens": 200.0},
    "starved_trainer": {"scheduler/trainer_wait_s": 1.8},
    "idle_engines": {"scheduler/buffer_wait_s": 1.8},
    "lag": {"lag/held_max_s": 0.4, "phase/score/lag_max_s": 0.39},
}


def test_a_sound_run_is_left_alone() -> None:
    assert advice(lines()) == []


@pytest.mark.parametrize("rule", sorted(SICK))
def test_each_rule_sees_its_own_and_nothing_else(rule: str) -> None:
    assert [one.rule for one in advice(lines(SICK[rule]))] == [rule]


def test_there_is_a_case_for_every_rule() -> None:
    assert {rule.__name__ for rule in RULES} == set(SICK)


@pytest.mark.parametrize("rule", sorted(SICK))
def test_one_odd_step_is_no_alarm(rule: str) -> None:
    raised = [one.rule for one in advice(lines(SICK[rule], for_steps=1))]
    assert raised == []


def test_alarms_come_before_hints_with_figures_and_reasons() -> None:
    found = advice(lines(SICK["truncated"] | SICK["failing_environment"]))
    assert [one.severity for one in found] == ["alarm", "hint"]
    assert found[0].seen == "40 % of rollouts ended without a reward, most of them sort: timeout"
    assert "generator.max_cache_tokens where prompts are long" in found[1].change
    assert "phase 'score'" in advice(lines(SICK["lag"]))[0].seen


def test_groups_of_equal_rewards_that_are_trained_on_raise_no_alarm_where_something_else_teaches() -> None:
    equal = {"group/zero_spread_share": 1.0, "rollout/filtered/zero_spread": 0.0, "reward/mean": 0.0}
    assert advice(lines(equal | {"training/distillation": 0.1}, for_steps=HISTORY)) == []
    (found,) = advice(lines(equal, for_steps=HISTORY))
    assert found.severity == "hint"
    seen = "100 % of groups have equal rewards, at a mean reward of 0.000: they teach nothing where advantages compare"
    assert found.seen == f"{seen} the rewards of a group"


@pytest.mark.parametrize(
    ("low", "mean", "high", "change"),
    [
        (0.0, 0.02, 1.0, r"too hard"),
        (0.0, 0.08, 0.1, r"too hard"),
        (0.0, 0.98, 1.0, r"solved already: harder tasks$"),
        (-1.0, 0.9, 1.0, r"solved already: harder tasks$"),
        (-1.0, -0.02, 0.0, r"solved already: harder tasks; or too hard"),
    ],
)
def test_without_spread_tasks_are_solved_or_too_hard_by_the_rewards_that_were_seen(
    low: float, mean: float, high: float, change: str
) -> None:
    rewards = {"reward/min": low, "reward/mean": mean, "reward/max": high}
    (found,) = advice(lines(SICK["no_spread"] | rewards, for_steps=HISTORY))
    assert re.match(change, found.change)


def test_before_there_are_enough_steps_nothing_is_said() -> None:
    assert advice(lines(SICK["no_spread"], count=4)) == []
    assert advice([]) == []


def test_every_metric_and_setting_that_is_named_exists() -> None:
    found: list[Advice] = [one for sick in SICK.values() for one in advice(lines(sick))]
    reference = settings_reference()
    for one in found:
        for metric in one.metrics:
            metric_spec(metric)
        for setting in re.findall(r"(?:rollouts|scheduling|trainer|generator|model)\.[a-z_.]+[a-z_]", one.change):
            assert f"`{setting.rsplit('.', 1)[-1]}`" in reference or f"`{setting}`" in reference, setting
