"""What is read of a run's parts once a step, beside what the scheduler reports: counts, waits, lag, memory, CPU time.

A gauge returns its metrics since it was last read, by the names of the metrics' table. It is read on the event loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import psutil

from tailrace.generation.router.replica import Replica
from tailrace.rollouts.agent_workers import AgentWorkers
from tailrace.rollouts.scoring import ModelUsage
from tailrace.scheduling import EnvironmentFigures, FeedFigures, SchedulerStatistics, Verdict
from tailrace.tracing.phase_totals import PhaseUsage
from tailrace.tracing.phases import PhaseRecorder
from tailrace.transport.payloads.accounts import PayloadAccounts, PayloadFigures
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.weights.lending import LendingFigures

Gauge: TypeAlias = Callable[[], Mapping[str, float]]

WAITS = {
    Verdict.ENGINES_FULL: "engines_wait_s",
    Verdict.BUDGET_SPENT: "budget_wait_s",
    Verdict.BUFFER_FULL: "buffer_wait_s",
    Verdict.WEIGHTS_OLD: "weights_wait_s",
    Verdict.STEP_STARTED: "edge_wait_s",
    Verdict.TRANSPORT_AWAY: "transport_wait_s",
    Verdict.ENOUGH: "enough_wait_s",
    Verdict.ENVIRONMENTS_FAIL: "failing_wait_s",
}
"""What held admission, and its metric's name."""


class SchedulerGauge:
    """Counts of rollouts and batches, and what admission and the trainer waited for."""

    def __init__(self, statistics: Callable[[], SchedulerStatistics]) -> None:
        self._statistics = statistics
        self._newest = statistics()
        """As of the last step."""

    def __call__(self) -> dict[str, float]:
        """Counts now, and waits since the last step."""
        before, now = self._newest, self._statistics()
        self._newest = now
        return {
            "scheduler/in_flight": now.in_flight,
            "scheduler/admitted": now.admitted,
            "scheduler/ready_groups": now.waiting_groups,
            "scheduler/queued_batches": now.batches_ahead,
            "scheduler/restarted_groups": now.restarted_groups,
            "scheduler/set_aside": now.set_aside,
            **{f"scheduler/{name}": now.waited_s[cause] - before.waited_s[cause] for cause, name in WAITS.items()},
            "scheduler/trainer_wait_s": now.trainer_waited_s - before.trainer_waited_s,
            "scheduler/held_s": now.held_s - before.held_s,
        }


@dataclass(slots=True, eq=False)
class _RoleProcess:
    """A role's present process, as of its last reading."""

    process: psutil.Process
    parent_pid: int
    cpu_s: float = 0.0
    """With that of children that have ended."""
    children_s: float = 0.0
    """Of those alone."""


class ProcessGauge:
    """CPU time and memory of all processes, by role. What a process used stays counted after its end, and counts once:
    for its role while it runs, and for its parent as far as it was not counted then.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """`pids` gives the processes that run now, by role."""
        self._pids = pids
        self._processes: dict[str, _RoleProcess] = {}
        self._counted_s: defaultdict[int, float] = defaultdict(float)
        """CPU time of ended roles that is to be left out of what their parent's children used, by the parent's pid."""

    def __call__(self) -> dict[str, float]:
        """Memory now, and CPU time since the last step, with that of children that have ended and had no role."""
        metrics: dict[str, float] = {}
        pids = self._pids()
        for role, one in [*self._processes.items()]:
            if pids.get(role) != one.process.pid or not one.process.is_running():
                self._counted_s[one.parent_pid] += one.cpu_s
                del self._processes[role]
        for role, pid in pids.items():
            try:
                metrics[f"memory/{role}_rss_bytes"], metrics[f"cpu/{role}_s"] = self._read(role, pid)
            except psutil.Error:
                continue
        return metrics

    def _read(self, role: str, pid: int) -> tuple[int, float]:
        """Resident bytes, and CPU time since the last reading. Raises `psutil.Error`."""
        if (one := self._processes.get(role)) is None:
            process = psutil.Process(pid)
            one = self._processes[role] = _RoleProcess(process, process.ppid())
        times, memory = one.process.cpu_times(), one.process.memory_info()
        children_s = times.children_user + times.children_system
        cpu_s = times.user + times.system + children_s
        counted_s = min(self._counted_s[pid], children_s - one.children_s)
        self._counted_s[pid] -= counted_s
        used_s = cpu_s - one.cpu_s - counted_s
        one.cpu_s, one.children_s = cpu_s, children_s
        return memory.rss, used_s


def agent_worker_gauges(workers: AgentWorkers | None) -> list[Gauge]:
    """What every agent worker holds and how its event loop runs, and what phases took there; none without workers."""
    if workers is None:
        return []

    def figures() -> dict[str, float]:
        return {
            f"agent_worker/{number}/{metric}": value
            for number, one in enumerate(workers.flush_figures())
            for metric, value in (
                ("rollouts", one.rollouts),
                ("restarts", one.restarts),
                ("lag_max_s", one.lag_max_s),
            )
        }

    return [figures, lambda: _phase_metrics(workers.flush_phases())]


def phase_gauge(phases: PhaseRecorder) -> Gauge:
    """What each phase of this process took."""
    return lambda: _phase_metrics(phases.flush())


def _phase_metrics(taken: Mapping[str, PhaseUsage]) -> dict[str, float]:
    return {metric: value for name, usage in taken.items() for metric, value in usage.metrics(name).items()}


def feed_gauge(figures: Callable[[], FeedFigures]) -> Gauge:
    """Where the stream of samples to an outside trainer is."""
    before = figures()

    def read() -> dict[str, float]:
        nonlocal before
        earlier, before = before, figures()
        return {
            "feed/consumers": before.consumers,
            "feed/samples_in_hand": before.in_hand,
            "feed/wanted_samples": before.wanted,
            "feed/returned_samples": before.returned - earlier.returned,
            "feed/trained_again": before.trained_again - earlier.trained_again,
        }

    return read


def environment_gauge(environments: Callable[[], Mapping[str, EnvironmentFigures]]) -> Gauge:
    """Where every environment of the mix is."""
    return lambda: {
        f"environment/{name}/{metric}": value
        for name, figures in environments().items()
        for metric, value in (
            ("trained_share", figures.trained_share),
            ("in_flight", figures.in_flight),
            ("trainable_share", figures.expected),
            ("barren_tasks", figures.untrainable_tasks),
        )
    }


def replica_gauge(replicas: Sequence[Replica]) -> Gauge:
    """What the router knows of every generator."""
    return lambda: {
        name: value for replica in replicas if replica.was_there for name, value in replica.metrics().items()
    }


def usage_gauge(usage: Callable[[], ModelUsage]) -> Gauge:
    """What judges or a teacher took; nothing where none was asked yet."""
    before = usage()

    def read() -> dict[str, float]:
        nonlocal before
        earlier, before = before, usage()
        return before.since(earlier).metrics("/") if before.calls else {}

    return read


def payload_gauge(payloads: PayloadAccounts) -> Gauge:
    """Bytes of payloads; nothing where there was none yet."""
    before = PayloadFigures()

    def read() -> dict[str, float]:
        nonlocal before
        earlier, before = before, payloads.figures
        if not before.recorded_bytes:
            return {}
        return {
            "payloads/recorded_bytes": before.recorded_bytes - earlier.recorded_bytes,
            "payloads/released_bytes": before.released_bytes - earlier.released_bytes,
            "payloads/held_bytes": before.held_bytes,
        }

    return read


def weights_gauge(figures: Callable[[], LendingFigures]) -> Gauge:
    """Weights that were sent over sockets; nothing where none were since the last step."""
    before = LendingFigures()

    def read() -> dict[str, float]:
        nonlocal before
        earlier, before = before, figures()
        new = before.since(earlier)
        if not new.sends:
            return {}
        metrics = {
            "weights/sent_bytes": float(new.sent_bytes),
            "weights/sent_share": new.sent_bytes / new.whole_bytes,
            "weights/whole_sends": float(new.whole_sends),
        }
        if new.compared_bytes:
            metrics["weights/changed_share"] = new.changed_bytes / new.compared_bytes
        return metrics

    return read


def redis_gauge(place: RedisPlace | None) -> Gauge:
    """What Redis was like for the orchestrator; nothing where there is none."""

    def read() -> dict[str, float]:
        if place is None:
            return {}
        figures = place.figures
        return {
            "redis/outages": figures.outages,
            "redis/away_s": figures.away_s,
            "redis/restored": figures.restored,
            "redis/ignored": figures.ignored,
        }

    return read
