"""What a run costs more on a Ray cluster of one machine than with `placement = "local"`: the quickstart's steady state.

    python benchmarks/ray_overhead.py [--json] [--quick] [--case ...]

Runs the quickstart with both placements, under Ray on a cluster of one node that this program starts on the loopback.
Both take turns of SLICE_S: while one has the machine, all processes of the other are stopped (SIGSTOP). So both meet
the same machine, whose speed changes within minutes by more than what is looked for. Compared are the tokens trained
per second of user and system CPU of all the run's processes, from the step WARM_UP on: the command's and all below it,
and under Ray each role with the actor that has it, and what else of Ray's runs there (raylet, head, agents, idle
workers) while the run is not stopped, which is `ray_daemons_cpu_s`: those are never stopped. `start_s` is from the
command to the first step's record, which is later than the first rollout, with the other run stopped. `case` median is
that of each column over the turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before NumPy

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import psutil
from benchmarks.peers import TAILRACE, environment

TURNS = 3
WARM_UP, STEPS, QUICK_STEPS = 10, 100, 30
COOL_DOWN = 3
"""Steps before the end that processes are looked at for the last time: one that has left has no CPU time."""
SLICE_S, LOOK_S = 1.0, 0.02
LEAST_RATIO, START_S = 0.97, 30.0
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
CPUS = 4


@dataclass(frozen=True)
class Row:
    """One turn."""

    case: str
    local_tokens_per_cpu_s: float
    ray_tokens_per_cpu_s: float
    ratio: float
    ray_daemons_cpu_s: float
    """While the run was in its steady state and not stopped; counted in Ray's rate."""
    start_s: float
    target: str
    met: bool | None
    """None where too few steps were taken to tell."""


@dataclass(frozen=True)
class RayCluster:
    """Of one node."""

    address: str
    daemons: list[psutil.Process]
    """Below which all other processes of Ray are."""

    def processes(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Those that belong to a run's roles, and all others."""
        roles, others = [], []
        for process in families(self.daemons):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                is_role = "RoleHost" in " ".join([process.name(), *command]) or "tailrace.lifecycle.child" in command
                (roles if is_role else others).append(process)
        return roles, others


@dataclass(frozen=True)
class Look:
    """At a run, when a step was recorded."""

    step: int
    own_cpu_s: float
    daemons_cpu_s: float
    """While the run was not stopped."""


class Run:
    """A training of the quickstart, which can be stopped and go on."""

    def __init__(self, folder: Path, steps: int, ray: RayCluster | None = None) -> None:
        self._log, self._ray = folder / "train.log", ray
        self._metrics = folder / "runs" / "quickstart" / "metrics.jsonl"
        placement = () if ray is None else ("--placement", "ray", "--ray.address", ray.address)
        options = ["--max_steps", str(steps), "--observability.live", "off", "--observability.stall_s", "600"]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [str(TAILRACE), "train", "quickstart", *options, *placement],
                cwd=folder,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._stopped: list[psutil.Process] = []
        self._daemons_cpu_s = 0.0
        """Until it was stopped for the last time, while it was not."""
        self.looks: list[Look] = []

    def go_on(self, until_step: int, for_s: float = float("inf")) -> bool:
        """Until this step is recorded, and then or after so many seconds stop again; whether it was."""
        for process in self._stopped:
            process.resume()
        ends_s, before_s = time.monotonic() + for_s, self._of_daemons_s()
        while (step := self._recorded()) < until_step and time.monotonic() < ends_s:
            if self._process.poll() is not None:
                sys.exit(self._log.read_text()[-4000:])
            if step >= WARM_UP and (not self.looks or step > self.looks[-1].step):
                self.looks.append(self._look(step, before_s))
            time.sleep(LOOK_S)
        self._stopped = self._processes()
        for process in self._stopped:
            process.suspend()
        self._daemons_cpu_s += self._daemons_since_s(before_s)
        return step >= until_step

    def end(self) -> None:
        """Its last steps."""
        for process in self._stopped:
            process.resume()
        if self._process.wait():
            sys.exit(self._log.read_text()[-4000:])

    def steady(self) -> tuple[float, float]:
        """Tokens trained per CPU-second, the daemons' included, and the CPU-seconds of those."""
        first, last = self.looks[0], self.looks[-1]
        lines = self._metrics.read_text().splitlines()[first.step : last.step]
        tokens = sum(json.loads(line)["bias/trained_tokens"] for line in lines)
        daemons_s = last.daemons_cpu_s - first.daemons_cpu_s
        return tokens / (last.own_cpu_s - first.own_cpu_s + daemons_s), daemons_s

    def _recorded(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def _processes(self) -> list[psutil.Process]:
        roles = [] if self._ray is None else self._ray.processes()[0]
        return [*families([psutil.Process(self._process.pid)]), *roles]

    def _of_daemons_s(self) -> dict[psutil.Process, float]:
        daemons = [] if self._ray is None else self._ray.processes()[1]
        return {daemon: cpu_s(daemon) for daemon in daemons}

    def _daemons_since_s(self, before_s: dict[psutil.Process, float]) -> float:
        """Of those that are there: what one that ended since had before is not taken off."""
        return sum(max(0.0, now_s - before_s.get(daemon, 0.0)) for daemon, now_s in self._of_daemons_s().items())

    def _look(self, step: int, before_s: dict[psutil.Process, float]) -> Look:
        daemons_s = self._daemons_cpu_s + self._daemons_since_s(before_s)
        return Look(step, sum(map(cpu_s, self._processes())), daemons_s)


def families(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [one for root in roots for one in (root, *root.children(recursive=True))]


def cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextlib.contextmanager
def cluster() -> Iterator[RayCluster]:
    quiet = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.update({**environment(), **quiet})
    from ray.cluster_utils import Cluster

    head = {"num_cpus": CPUS, "node_ip_address": LOOPBACK, "object_store_memory": OBJECT_STORE_BYTES}
    started = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        yield RayCluster(started.address, psutil.Process().children())
    finally:
        started.shutdown()


def turn(number: int, steps: int, *, quick: bool) -> Row:
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-ray-"))) for _ in range(2)]
        ray = stack.enter_context(cluster())
        local = Run(folders[0], steps)
        local.go_on(WARM_UP)
        began_s = time.monotonic()
        under_ray = Run(folders[1], steps, ray)
        under_ray.go_on(1)
        start_s = time.monotonic() - began_s
        under_ray.go_on(WARM_UP)
        for run in itertools.cycle((local, under_ray)):
            if run.go_on(steps - COOL_DOWN, SLICE_S):
                break
        for run in (local, under_ray):
            run.end()
        found = row(f"turn-{number}", local.steady()[0], *under_ray.steady(), start_s, quick=quick)
    progress(f"turn {number}: {found}")
    return found


def row(case: str, local_per_s: float, ray_per_s: float, daemons_s: float, start_s: float, *, quick: bool) -> Row:
    ratio = ray_per_s / local_per_s
    return Row(
        case=case,
        local_tokens_per_cpu_s=local_per_s,
        ray_tokens_per_cpu_s=ray_per_s,
        ratio=ratio,
        ray_daemons_cpu_s=daemons_s,
        start_s=start_s,
        target=f"ratio at least {LEAST_RATIO}, start within {START_S:.0f} s",
        met=None if quick else ratio >= LEAST_RATIO and start_s <= START_S,
    )


def median(rows: list[Row], *, quick: bool) -> Row:
    figures = {one.name: statistics.median(getattr(row, one.name) for row in rows) for one in fields(Row)[1:6]}
    met = None if quick else figures["ratio"] >= LEAST_RATIO and figures["start_s"] <= START_S
    return Row(case="median", **figures, target=rows[0].target, met=met)


def main() -> None:
    options = parse_options(__doc__)
    turns = 1 if options.quick else TURNS
    chosen = [int(name.removeprefix("turn-")) for name in options.choose([f"turn-{one}" for one in range(turns)])]
    steps = QUICK_STEPS if options.quick else STEPS
    rows = [turn(number, steps, quick=options.quick) for number in chosen]
    report("Ray beside local", [*rows, median(rows, quick=options.quick)], options)


if __name__ == "__main__":
    main()
