"""How long each stage of a shutdown may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ShutdownSettings(BaseModel):
    """Deadlines of the stages of a shutdown, in seconds. A stage that overruns its own is given up, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cancel_rollouts_s: float = Field(default=10.0, gt=0, description="seconds for rollouts in flight to be cancelled")
    last_save_s: float = Field(default=120.0, gt=0, description="seconds for the trainer's last checkpoint")
    close_transports_s: float = Field(default=5.0, gt=0, description="seconds for batch queue and stores to close")
    stop_generators_s: float = Field(default=10.0, gt=0, description="seconds for generators to end")
    close_event_log_s: float = Field(default=5.0, gt=0, description="seconds for the event log's followers to end")
    terminate_s: float = Field(default=5.0, gt=0, description="seconds from SIGTERM to SIGKILL, for each process")

    def deadline_s(self, stage: str) -> float:
        """Of a stage, by its name."""
        deadline: float = self.model_dump()[f"{stage}_s"]
        return deadline
