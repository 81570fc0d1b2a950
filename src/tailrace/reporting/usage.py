"""CPU time and memory of a run's processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process, the children it waited for included."""

    cpu_s: float
    rss_bytes: int


class ProcessMeter:
    """Reads the usage of processes by role. What a process used stays counted after its end, and by its successor."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """`pids` gives the processes that run now, by role."""
        self._pids = pids
        self._processes: dict[str, psutil.Process] = {}
        self._before_s: dict[str, float] = {}
        """CPU time of a role's earlier processes."""
        self._newest: dict[str, Usage] = {}
        self.peak_rss_bytes: dict[str, int] = {}

    def read(self) -> dict[str, Usage]:
        """Usage by role, since each process began."""
        for role, pid in self._pids().items():
            try:
                process = self._process(role, pid)
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue
            cpu_s = times.user + times.system + times.children_user + times.children_system
            self._newest[role] = Usage(cpu_s + self._before_s.get(role, 0.0), memory.rss)
            self.peak_rss_bytes[role] = max(memory.rss, self.peak_rss_bytes.get(role, 0))
        return dict(self._newest)

    def _process(self, role: str, pid: int) -> psutil.Process:
        process = self._processes.get(role)
        if process is None or process.pid != pid:
            if role in self._newest:
                self._before_s[role] = self._newest[role].cpu_s
            process = self._processes[role] = psutil.Process(pid)
        return process


def total_cpu_s(usage: Mapping[str, Usage]) -> float:
    """User and system CPU time of all processes."""
    return sum(one.cpu_s for one in usage.values())
