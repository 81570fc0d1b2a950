"""Plans of `tailrace simulate`: a TOML file, its policies, a sweep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.overrides import apply_overrides, parse_overrides
from tailrace.config.problems import validated
from tailrace.config.sources import Places, Table, read_settings_file, recipe_folder
from tailrace.errors import SettingsError
from tailrace.scheduling import SchedulingSettings
from tailrace.scheduling.settings import staleness_contradiction
from tailrace.simulation import SimulationPlan

_FOLDER = "simulations"
_OF_STALENESS = (("schedule",), ("scheduling", "max_staleness"))
"""What of a sweep may contradict a policy."""


def list_plans() -> list[str]:
    """The packaged plans."""
    return sorted(path.stem for path in (recipe_folder() / _FOLDER).glob("*.toml"))


def load_plans(
    plan: str,
    overrides: Sequence[str] = (),
    *,
    sweep: str | None = None,
    tell_left_out: Callable[[str], None] = lambda told: None,
) -> list[SimulationPlan]:
    """The plan of a packaged name or a TOML file, once for each of its `[[policies]]` and each value of the sweep.

    A policy is a table laid over the plan. `sweep` is `KEY=VALUE,VALUE,...`; where a value contradicts a policy's
    schedule the two are left out, which `tell_left_out` is told. Raises `SettingsError`, also where nothing is left.

    >>> [plan.name for plan in load_plans("long-tail", sweep="max_staleness=0,4")]
    ['sync, max_staleness = 0', 'stream, max_staleness = 0', 'stream, max_staleness = 4']
    """
    is_file = Path(plan).suffix == ".toml"
    if not is_file and plan not in list_plans():
        known = f"Plans: {', '.join(list_plans())}. A file of your own ends in .toml"
        raise SettingsError(f"there is no plan {plan!r}. {known}")
    file = read_settings_file(plan if is_file else f"{_FOLDER}/{plan}")
    given = parse_overrides(overrides, SimulationPlan)
    base = copy.deepcopy(file.table)
    policies = base.pop("policies", None) or [{}]
    if not isinstance(policies, list) or not all(isinstance(policy, dict) for policy in policies):
        raise SettingsError(f"{file.path}: policies are tables, each under [[policies]]")
    plans: list[SimulationPlan] = []
    left_out: list[str] = []
    for policy in policies:
        for key, value in _swept(sweep):
            table, places = apply_overrides(_laid_over(base, policy), given), Places(file, set(given))
            if key:
                places.overridden.add(key)
                name = table.get("name", "")
                table = apply_overrides(table, {key: value})
                table["name"] = f"{name}, {key[-1]} = {value}" if name else f"{key[-1]} = {value}"
            if key in _OF_STALENESS and (why := _contradiction(table)):
                left_out.append(f"{table['name']} is left out: {why}")
            else:
                plans.append(validated(SimulationPlan, table, places))
    if not plans:
        raise SettingsError("\n".join(left_out))
    for told in left_out:
        tell_left_out(told)
    return plans


def _contradiction(table: Table) -> str:
    scheduling = table.get("scheduling")
    chosen = scheduling.get("max_staleness") if isinstance(scheduling, dict) else None
    return staleness_contradiction(table.get("schedule"), chosen)


def _laid_over(base: Table, policy: Table) -> Table:
    merged = copy.deepcopy(base)
    for key, value in policy.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _laid_over(merged[key], value) if both_tables else copy.deepcopy(value)
    return merged


def _swept(sweep: str | None) -> list[tuple[tuple[str, ...], Any]]:
    """Each value with its key; one pair without a key where nothing is swept."""
    if sweep is None:
        return [((), None)]
    name, equals, values = sweep.partition("=")
    if not equals or not values:
        raise SettingsError(f"--sweep {sweep!r} is no KEY=VALUE,VALUE,...; an example: --sweep max_staleness=0,1,4")
    key = name.strip()
    if key in SchedulingSettings.model_fields:
        key = f"scheduling.{key}"
    pairs = [parse_overrides([f"--{key}={value.strip()}"], SimulationPlan) for value in values.split(",")]
    return [next(iter(pair.items())) for pair in pairs]
