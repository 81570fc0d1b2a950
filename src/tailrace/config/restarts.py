"""How often what fails in a run is started again, and what is kept for that."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RestartSettings(BaseModel):
    """When a process of a run that ends early is started again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_role: int = Field(
        3,
        ge=0,
        le=1000,
        description="Times within window_s that one generator, or the trainer, is started again; 0: the first end of a"
        " trainer, or of the last generator, fails the run.",
    )
    window_s: float = Field(600.0, gt=0, description="Seconds for which a restart counts against per_role.")
    backoff_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Pause before the second restart within window_s; every further one is twice as long, 30 s at most."
        " The first comes at once.",
    )
    silence_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without a sign of life after which a process of the run that is stopped (SIGSTOP) is"
        " killed, and started again.",
    )
    stuck_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds for which any other process may give no sign of life or hold its own event loop, or a step"
        " of the trainer may not compute, before it is killed and started again. What computes is never stuck, however"
        " long it takes.",
    )
    retained_mb: float = Field(
        1024.0,
        ge=0,
        description="Megabytes of batches, routed experts included, that are kept since the newest checkpoint, to be"
        " trained again by a trainer that is started again; of shared memory no more than a quarter of what is free at"
        " the start, of Redis no more than a quarter of its maxmemory. Beyond that the oldest are let go, and a trainer"
        " that ends before the next checkpoint fails the run.",
    )
