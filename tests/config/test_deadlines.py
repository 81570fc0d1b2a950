from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel

from tailrace.config import RunSettings, load_settings, with_scaled_deadlines
from tailrace.config.deadlines import DEADLINES
from tailrace.errors import SettingsError

OTHERS = {
    *("restarts.window_s", "restarts.backoff_s", "evaluation.finish_s", "environments.timeout_s"),
    *("rollouts.timeout_s", "rollouts.reward_timeout_s", "rollouts.worker_timeout_s", "scheduling.max_failing_s"),
    *("gateway.client_timeout_s", "gateway.keep_alive_s", "ray.wait_s", "generator.connect_wait_s"),
    *(f"environments.judge.{name}_s" for name in ("timeout", "retry_pause")),
    *(f"trainer.loss.distillation.{name}_s" for name in ("timeout", "retry_pause")),
    *("generator.load_backoff_s", "generator.router.report_every_s"),
    *(f"generator.replicas.{name}_after_s" for name in ("grow", "shrink")),
    *(f"observability.{name}" for name in ("log_every_s", "lag_interval_s", "stall_s", "tracker_close_s")),
}
"""Durations that are no deadlines of a run's own parts: users' work, outages of what they call, pauses, intervals."""


def durations(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from durations(value, f"{prefix}{name}.")
        elif name.endswith("_s"):
            yield f"{prefix}{name}", value


def sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Those that a field may hold, alone, among others or in an array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections(argument)


def possible_durations(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names of all that some settings may have."""
    for name, field in section.model_fields.items():
        if name.endswith("_s"):
            yield f"{prefix}{name}"
        for inner in sections(field.annotation):
            yield from possible_durations(inner, f"{prefix}{name}.")


def test_every_deadline_is_multiplied_and_nothing_else() -> None:
    settings = load_settings("quickstart", ["--restarts.silence_s", "7", "--transport.redis.outage_s", "5"])
    plain = dict(durations(settings))
    scaled = with_scaled_deadlines(settings.model_copy(update={"deadline_scale": 0.25}))
    assert dict(durations(scaled)) == {
        name: value * 0.25 if name in DEADLINES else value for name, value in plain.items()
    }
    assert (scaled.restarts.silence_s, scaled.transport.redis.outage_s) == (1.75, 1.25)
    assert scaled.model_dump(exclude={name.split(".")[0] for name in DEADLINES}) == settings.model_dump(
        exclude={name.split(".")[0] for name in DEADLINES}
    )


def test_a_duration_is_a_deadline_of_the_run_or_is_said_to_be_none() -> None:
    assert {*possible_durations(RunSettings)} == {*DEADLINES, *OTHERS}


def test_what_is_scaled_once_is_not_scaled_again() -> None:
    once = with_scaled_deadlines(load_settings("quickstart", ["--deadline_scale", "3"]))
    assert once.deadline_scale == 1
    assert with_scaled_deadlines(once) is once
    assert RunSettings.model_validate(once.model_dump()) == once


@pytest.mark.parametrize("scale", ["0", "-1", "inf", "nan", "1e9"])
def test_a_factor_that_leaves_no_deadline_is_refused(scale: str) -> None:
    with pytest.raises(SettingsError, match="deadline_scale"):
        load_settings("quickstart", ["--deadline_scale", scale])
