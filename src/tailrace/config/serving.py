"""Settings of `tailrace serve`: the sections of a run that concern a generator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.config.contradictions import Contradictions
from tailrace.config.contradictions.generators import context_beyond_slots
from tailrace.config.gateway import GatewaySettings
from tailrace.config.overrides import apply_overrides, parse_overrides
from tailrace.config.problems import validated
from tailrace.config.sources import COMMAND_LINE, Key, Places, SettingsFile, as_index
from tailrace.errors import SettingsError
from tailrace.generation.settings import GeneratorSettings, ModelSettings

OF_RUNS = ("replicas", "restart", "connect", "connect_key", "connect_wait_s", "join_address", "join_key", "devices")
"""Settings of section generator that say how a run has its generators, and nothing of one of them."""


class ServeSettings(BaseModel):
    """A generator that no run started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSettings
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    gateway: GatewaySettings | None = None
    """None: no HTTP."""

    @property
    def max_model_tokens(self) -> int:
        """Prompt and completion together, at most."""
        return min(self.model.max_model_tokens or self.generator.max_cache_tokens, self.generator.max_cache_tokens)

    @model_validator(mode="after")
    def _require_consistent(self) -> ServeSettings:
        if found := list(context_beyond_slots(self.model, self.generator)):
            raise Contradictions(found)
        return self


def load_serve_settings(model: str, overrides: Sequence[str], http: str | None = None) -> ServeSettings:
    """Of `model`, with the command line's `--model.*`, `--generator.*` and `--gateway.*`. Raises `SettingsError`.

    `http` is where the gateway listens, `HOST:PORT`; without it there is none.

    >>> load_serve_settings("bundled:quickstart", ["--generator.slots", "8"]).generator.slots
    8
    """
    given = _given(overrides)
    table = apply_overrides({"model": {"name": model}, **_gateway(http, given)}, given)
    return validated(ServeSettings, table, Places(SettingsFile(COMMAND_LINE, table), set(given)))


def joined_settings(offered: bytes, model: str | None, overrides: Sequence[str]) -> ServeSettings:
    """Those that a run offers to what joins it, as JSON, and the command line's. Raises `SettingsError`."""
    given = _given(overrides) | ({("model", "name"): model} if model else {})
    if of_http := [key for key in given if key[0] == "gateway"]:
        raise SettingsError(f"--{'.'.join(of_http[0])}: a generator that joins a run answers that run alone")
    table = apply_overrides(json.loads(offered), given)
    return validated(ServeSettings, table, Places(SettingsFile("the run's settings", table), set(given)))


def _given(overrides: Sequence[str]) -> dict[tuple[str, ...], Any]:
    given = parse_overrides(overrides, ServeSettings)
    if misplaced := [key for key in given if key[0] == "generator" and key[1:2] and key[1] in OF_RUNS]:
        raise SettingsError(f"--{'.'.join(misplaced[0])} is a setting of runs: `tailrace serve` starts one generator")
    return given


def _gateway(http: str | None, given: Iterable[Key]) -> dict[str, Any]:
    """The section that an address stands for. Raises `SettingsError`."""
    chosen = [key for key in given if key[0] == "gateway"]
    if http is None:
        if chosen:
            raise SettingsError(f"--{'.'.join(map(str, chosen[0]))} is about HTTP: say where to listen (--http)")
        return {}
    host, _, port = http.rpartition(":")
    if not host or not isinstance(number := as_index(port), int):
        raise SettingsError(f"--http {http} is no address: write HOST:PORT, such as 127.0.0.1:8000")
    if twice := [key for key in chosen if key[1:] in (("host",), ("port",))]:
        raise SettingsError(f"--{'.'.join(map(str, twice[0]))} says again where to listen: --http does")
    return {"gateway": {"host": host.strip("[]"), "port": number}}
