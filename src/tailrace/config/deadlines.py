"""All deadlines of a run's own parts at once: for a machine that is slow, or for a test that shall not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel

from tailrace.config.settings import RunSettings
from tailrace.config.shutdown import ShutdownSettings

ModelT = TypeVar("ModelT", bound=BaseModel)

DEADLINES = (
    *("restarts.silence_s", "restarts.stuck_s"),
    *(f"shutdown.{name}" for name in ShutdownSettings.model_fields),
    *(f"generator.router.{name}_deadline_s" for name in ("progress", "starved", "start")),
    *("rollouts.agent_block_s", "rollouts.worker_start_timeout_s"),
    "trainer.collective_timeout_s",
    "transport.redis.outage_s",
    *("observability.no_progress_s", "observability.watchdog_s"),
)
"""How long one part of a run is waited for by another. Not those of users' code, calls and clients: a rollout that
takes its time takes it on a slow machine and in a test."""


def with_scaled_deadlines(settings: RunSettings) -> RunSettings:
    """The settings with each of `DEADLINES` multiplied by `deadline_scale`, which then is 1.

    >>> from tailrace.config import load_settings
    >>> with_scaled_deadlines(load_settings("quickstart", ["--deadline_scale", "0.5"])).shutdown.grace_s
    12.5
    """
    if (scale := settings.deadline_scale) == 1:
        return settings
    for name in DEADLINES:
        settings = _multiplied(settings, name.split("."), scale)
    return settings.model_copy(update={"deadline_scale": 1.0})


def _multiplied(section: ModelT, path: Sequence[str], scale: float) -> ModelT:
    name, *inner = path
    value = getattr(section, name)
    return section.model_copy(update={name: _multiplied(value, inner, scale) if inner else value * scale})
