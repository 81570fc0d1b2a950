"""How long each part of a run's end may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

HURRIED_WRITES_S = 10.0
"""For all records that wait for the disk, after SIGTERM or a notice of preemption: who sends it waits for no more."""


class ShutdownSettings(BaseModel):
    """Deadlines of a run's end; what overruns one is named in the log and ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grace_s: float = Field(
        25.0,
        gt=0,
        description="Seconds from SIGTERM, or from a notice of preemption, for the step that is computed and the last"
        " checkpoint; then the trainer is killed, and the newest checkpoint is the one before. Choose less than the"
        " scheduler gives.",
    )
    last_save_s: float = Field(
        120.0,
        gt=0,
        description="Seconds for the same after Ctrl-C, or where the run fails: from the wish to stop to the answer. A"
        " run that finishes has no such deadline.",
    )
    cancel_rollouts_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for rollouts to end that are cancelled, and as many for what they were played with: their"
        " processes, which are killed then, and `close` of each environment.",
    )
    close_transports_s: float = Field(5.0, gt=0, description="Seconds for the batch queue to close.")
    stop_generators_s: float = Field(10.0, gt=0, description="Seconds for generators to end.")
    close_event_log_s: float = Field(
        15.0, gt=0, description="Seconds for the trainer to leave, after the event log has ended."
    )
    terminate_s: float = Field(
        5.0,
        gt=0,
        description="Seconds from the wish that a process ends until it is killed with all that it started; 15 at most"
        " once the run's own process is gone.",
    )
