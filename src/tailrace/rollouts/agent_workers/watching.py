"""What a run sees of its agent workers, and what they are told of how it watches them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tailrace.rollouts.agent_workers.messages import Beat
from tailrace.tracing.phase_totals import PhaseUsage


@dataclass(frozen=True, slots=True)
class WorkerWatch:
    """How the processes of a run are watched."""

    log: Path | None = None
    """What agent workers print; None: it goes where the orchestrator's own output goes."""
    trace_folder: Path | None = None
    """Where processes leave their parts of the trace; None: nowhere."""
    trace_bytes: int = 0
    """Of one process at most."""
    lag_interval_s: float = 0.1
    stall_s: float = 1.0
    """An event loop that is held for so long is logged with its stack."""


@dataclass(frozen=True, slots=True)
class AgentWorkerFigures:
    """One worker, now."""

    pid: int | None
    """None while there is no process."""
    rollouts: int
    """That it holds."""
    restarts: int
    """In all."""
    lag_max_s: float
    """Of its event loop since it was last read."""


class BeatSums:
    """What the beats of a worker told, since it was last read."""

    def __init__(self) -> None:
        self._lag_max_s = 0.0
        self._phases: dict[str, PhaseUsage] = {}

    def add(self, beat: Beat) -> None:
        """One more beat."""
        self._lag_max_s = max(self._lag_max_s, beat.lag_max_s)
        for name, taken in beat.phases.items():
            self._phases[name] = self._phases.get(name, PhaseUsage()).merged(taken)

    def flush_lag_s(self) -> float:
        """The longest lag; starts over."""
        lag_s, self._lag_max_s = self._lag_max_s, 0.0
        return lag_s

    def flush_phases(self) -> dict[str, PhaseUsage]:
        """What each phase took; starts over."""
        phases, self._phases = self._phases, {}
        return phases
