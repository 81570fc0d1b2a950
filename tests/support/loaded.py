"""Environments as a rollouter takes them."""

from __future__ import annotations

from tailrace.environments import EnvironmentSpec
from tailrace.rollouts import LoadedEnvironment, RolloutSettings


def loaded(*specs: EnvironmentSpec, settings: RolloutSettings | None = None) -> dict[str, LoadedEnvironment]:
    """Specs that were not loaded from settings, by their names."""
    return {spec.name: LoadedEnvironment.of(spec, settings or RolloutSettings()) for spec in specs}
