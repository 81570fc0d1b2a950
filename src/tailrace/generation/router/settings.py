"""Settings of the router over several generators."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterSettings(BaseModel):
    """How requests, weights and failures are spread over the replicas of the generator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["sticky", "least_loaded"] = Field(
        default="sticky",
        description="sticky: where the session's or else the group's prefix is cached, unless that replica is "
        "overloaded; least_loaded: wherever there is most room",
    )
    escape_ratio: float = Field(
        default=1.5, ge=1, description="A replica is overloaded above this many times the least load plus escape_slack"
    )
    escape_slack: float = Field(
        default=0.1, ge=0, description="See escape_ratio; in shares of what a replica's cache holds"
    )
    loading_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the replicas that may load weights at once (one always may); those that are starved of "
        "weights have as many turns of their own",
    )
    report_every_s: float = Field(
        default=0.5,
        gt=0,
        description="Seconds between two reports of a replica's load; also how soon a lost client shows",
    )
    progress_deadline_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without any progress after which a replica with requests or a load of weights counts as "
        "dead; in a replica without requests, weights must be read and copied within them",
    )
    starved_deadline_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds of loads of weights that failed, and of pauses after them, by which a replica is "
        "restarted that has none of the trainer's, or trails it by scheduling.max_staleness; also what weights may "
        "take through Ray's object store",
    )
    start_deadline_s: float = Field(
        default=600.0, gt=0, description="Seconds from a replica's start (or the attempt to connect) until it serves"
    )
    max_failovers: int = Field(
        default=3, ge=0, description="Replicas that may die under one request before that request is refused"
    )
