"""Settings of `tailrace serve`: the sections of a run that concern a generator."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from tailrace.config.overrides import apply_overrides, parse_overrides
from tailrace.config.problems import validated
from tailrace.config.sources import Places, SettingsFile
from tailrace.errors import SettingsError
from tailrace.generation.settings import GeneratorSettings, ModelSettings

_OF_RUNS = ("replicas", "restart", "connect", "connect_key", "devices")


class ServeSettings(BaseModel):
    """A generator that no run started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSettings
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)


def load_serve_settings(model: str, overrides: Sequence[str]) -> ServeSettings:
    """Of `model`, with the command line's `--model.*` and `--generator.*`. Raises `SettingsError`.

    >>> load_serve_settings("bundled:quickstart", ["--generator.slots", "8"]).generator.slots
    8
    """
    given = parse_overrides(overrides)
    if misplaced := [key for key in given if key[0] == "generator" and key[1:2] and key[1] in _OF_RUNS]:
        raise SettingsError(f"--{'.'.join(misplaced[0])} is a setting of runs: `tailrace serve` starts one generator")
    table = apply_overrides({"model": {"name": model}}, given)
    return validated(ServeSettings, table, Places(SettingsFile("command line", table), set(given)))
