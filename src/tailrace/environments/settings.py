"""What a user may say about one environment of a run."""

from __future__ import annotations

import datetime

from pydantic import BaseModel, Field, field_validator

from tailrace.environments.judge import JudgeSettings
from tailrace.records import Json


class RewardSettings(BaseModel, extra="forbid", frozen=True):
    """One function of an environment's weighted sum: `[environments.rewards.NAME]` in TOML."""

    function: str | None = Field(None, description="As `module:attribute`. Unset: the environment's of this name.")
    weight: float | None = Field(None, description="In the sum. Unset: the environment's own, or 1.")
    together: bool | None = Field(None, description="Call it once per group. Unset: the environment's own, or no.")


class EnvironmentSettings(BaseModel, extra="forbid", frozen=True):
    """One environment of the run: `[[environments]]` in TOML, `--environment.*` on the command line.

    These settings alone re-create the environment in any process (see `load_environment`).
    """

    name: str = Field(description="A built-in or installed environment, or your own as `module:attribute`.")
    id: str | None = Field(None, min_length=1, description="Name in metrics and files; None: the environment's own.")
    args: dict[str, Json] = Field({}, description="Keyword arguments of the environment's factory, agent or class.")
    data: str | None = Field(
        None,
        description="Task rows in place of its own: a .jsonl, .json or .csv file (also as .gz), a .parquet file, a"
        " `datasets` folder, or hub:OWNER/NAME[/CONFIG][:SPLIT] of the Hugging Face hub.",
    )
    eval_data: str | None = Field(None, description="Held-out task rows, as `data`; None: see `eval_tasks`.")
    eval_tasks: int | None = Field(
        None,
        ge=0,
        description="Held-out tasks: the first of its own, or taken out of the training rows; None: its own.",
    )
    weight: float = Field(1.0, gt=0, description="Relative share of this environment among training tasks.")
    trusted: bool | None = Field(
        None, description="Run its synchronous code on the event loop, not in killable workers; None: as it declares."
    )
    rewards: dict[str, RewardSettings] = Field(
        {}, description="Named reward functions in TRL's form: tables with `function`, `weight` and `together`."
    )
    judge: JudgeSettings | None = Field(None, description="A language model that ranks the rollouts of a group.")
    group_size: int | None = Field(None, ge=1, le=2**20, description="Rollouts per task; None: the run's.")
    max_turns: int | None = Field(None, ge=1, description="Turns per rollout at most; None: the run's.")
    max_tokens: int | None = Field(None, ge=1, le=2**24, description="Tokens per completion at most; None: the run's.")
    timeout_s: float | None = Field(None, gt=0, description="Seconds per rollout, scoring included; None: the run's.")
    columns: tuple[str, ...] | None = Field(
        None, description="Columns and attributes to save with its rollouts; None: all that it reports."
    )
    temperature: float | None = Field(None, gt=0, description="Of training rollouts; None: the run's.")

    @field_validator("args")
    @classmethod
    def _without_dates(cls, args: dict[str, Json]) -> dict[str, Json]:
        """So that they are one thing here, in other processes and in a resume, which get them as JSON."""
        return {name: _dates_as_text(value) for name, value in args.items()}


def _dates_as_text(value: Json) -> Json:
    """TOML has dates and times, JSON has none.

    >>> _dates_as_text({"since": datetime.date(2026, 1, 31), "at": [datetime.time(12), 7]})
    {'since': '2026-01-31', 'at': ['12:00:00', 7]}
    """
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _dates_as_text(entry) for name, entry in value.items()}
    return [_dates_as_text(entry) for entry in value] if isinstance(value, list) else value
