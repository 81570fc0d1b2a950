"""CPU time and memory of a run's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process, the children it waited for included."""

    cpu_s: float
    rss_bytes: int


class ProcessMeter:
    """Reads the usage of processes by role. What a process used stays counted after its end."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {role: psutil.Process(pid) for role, pid in pids.items()}
        self._newest: dict[str, Usage] = {}
        self.peak_rss_bytes: dict[str, int] = {}

    def read(self) -> dict[str, Usage]:
        """Usage by role, since each process began."""
        for role, process in self._processes.items():
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue
            cpu_s = times.user + times.system + times.children_user + times.children_system
            self._newest[role] = Usage(cpu_s, memory.rss)
            self.peak_rss_bytes[role] = max(memory.rss, self.peak_rss_bytes.get(role, 0))
        return dict(self._newest)


def total_cpu_s(usage: Mapping[str, Usage]) -> float:
    """User and system CPU time of all processes."""
    return sum(one.cpu_s for one in usage.values())
