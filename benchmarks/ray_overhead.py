"""What a run costs more on a Ray cluster of one machine than with `placement = "local"`: the quickstart's steady state.

    python benchmarks/ray_overhead.py [--json] [--quick] [--case ...]

Runs the quickstart with both placements at once, each on a core of its own, so that both meet the same machine; the
next turn swaps the cores. Under Ray it runs on a cluster of one node that this program starts on the loopback. From
the step WARM_UP to one of the last, the tokens trained over user and system CPU of the run's processes: the command's
and all below it, and under Ray each role with the actor that has it. What else of Ray's runs there (raylet, head,
agents, idle workers) is `ray_daemons_cpu_s`. `start_s` is from the command to the first step's record, which is later
than the first rollout. `case` median is that of each column over the turns.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import psutil
from benchmarks.peers import TAILRACE, environment

TURNS = 3
WARM_UP, STEPS, QUICK_STEPS = 10, 100, 18
COOL_DOWN = 3
"""Steps before the end that processes are looked at for the last time: one that has left has no CPU time."""
LEAST_RATIO, START_S = 0.97, 30.0
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
CPUS = 4
LOOK_S = 0.5


@dataclass(frozen=True)
class Row:
    """One turn."""

    case: str
    local_tokens_per_cpu_s: float
    ray_tokens_per_cpu_s: float
    ratio: float
    ray_daemons_cpu_s: float
    """While the run was in its steady state."""
    start_s: float
    target: str
    met: bool | None
    """None where too few steps were taken to tell."""


@dataclass(frozen=True)
class Steady:
    """Of one run."""

    tokens_per_cpu_s: float
    start_s: float
    daemons_cpu_s: float = 0.0


@dataclass(frozen=True)
class RayCluster:
    """Of one node."""

    address: str
    daemons: list[psutil.Process]
    """Below which all other processes of Ray are."""


def measure(folder: Path, core: int, steps: int, ray: RayCluster | None = None) -> Steady:
    """One run, on this core, under Ray where there is a cluster."""
    placement = () if ray is None else ("--placement", "ray", "--ray.address", ray.address)
    arguments = ["train", "quickstart", "--max_steps", str(steps), "--observability.live", "off", *placement]
    began_s = time.monotonic()
    with (folder / "train.log").open("w") as output:
        run = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), str(TAILRACE), *arguments],
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        metrics = folder / "runs" / "quickstart" / "metrics.jsonl"
        wait_for(metrics, 1, run, folder)
        start_s = time.monotonic() - began_s
        wait_for(metrics, WARM_UP, run, folder)
        first, before = len(lines(metrics)), taken_s(run, ray)
        wait_for(metrics, steps - COOL_DOWN, run, folder)
        last, after = len(lines(metrics)), taken_s(run, ray)
        if run.wait():
            sys.exit((folder / "train.log").read_text()[-4000:])
    tokens = sum(line["bias/trained_tokens"] for line in lines(metrics)[first:last])
    own_s, all_ray_s = (after[0] - before[0], after[1] - before[1])
    return Steady(tokens / own_s, start_s, all_ray_s)


def taken_s(run: subprocess.Popen[bytes], ray: RayCluster | None) -> tuple[float, float]:
    """CPU of the run's own processes, and of all others that are Ray's."""
    own_s, others_s = sum(map(cpu_s, family(psutil.Process(run.pid)))), 0.0
    for process in itertools.chain.from_iterable(map(family, ray.daemons if ray is not None else ())):
        with contextlib.suppress(psutil.Error):
            is_role = "RoleHost" in process.name() or "RoleHost" in " ".join(process.cmdline())
            is_role = is_role or "tailrace.lifecycle.child" in process.cmdline()
            own_s, others_s = own_s + is_role * cpu_s(process), others_s + (not is_role) * cpu_s(process)
    return own_s, others_s


def family(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def lines(metrics: Path) -> list[dict[str, float]]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(metrics: Path, count: int, run: subprocess.Popen[bytes], folder: Path) -> None:
    while len(lines(metrics)) < count:
        if run.poll() is not None:
            sys.exit((folder / "train.log").read_text()[-4000:])
        time.sleep(LOOK_S)


@contextlib.contextmanager
def cluster(core: int) -> Iterator[RayCluster]:
    """One on this core."""
    quiet = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.update({**environment(), **quiet})
    from ray.cluster_utils import Cluster

    head = {"num_cpus": CPUS, "node_ip_address": LOOPBACK, "object_store_memory": OBJECT_STORE_BYTES}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # which Ray's processes inherit
    try:
        started = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    finally:
        os.sched_setaffinity(0, cores)
    try:
        yield RayCluster(started.address, psutil.Process().children())
    finally:
        started.shutdown()


def turn(number: int, steps: int, *, quick: bool) -> Row:
    cores = sorted(os.sched_getaffinity(0))[:2]
    own, rays = reversed(cores) if number % 2 else cores
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-ray-"))) for _ in range(2)]
        ray = stack.enter_context(cluster(rays))
        sides = stack.enter_context(ThreadPoolExecutor())
        local = sides.submit(measure, folders[0], own, steps)
        under_ray = sides.submit(measure, folders[1], rays, steps, ray)
        found = row(f"turn-{number}", local.result().tokens_per_cpu_s, under_ray.result(), quick=quick)
    progress(f"turn {number}: {found}")
    return found


def row(case: str, local_tokens_per_cpu_s: float, ray: Steady, *, quick: bool) -> Row:
    ratio = ray.tokens_per_cpu_s / local_tokens_per_cpu_s
    return Row(
        case=case,
        local_tokens_per_cpu_s=local_tokens_per_cpu_s,
        ray_tokens_per_cpu_s=ray.tokens_per_cpu_s,
        ratio=ratio,
        ray_daemons_cpu_s=ray.daemons_cpu_s,
        start_s=ray.start_s,
        target=f"ratio at least {LEAST_RATIO}, start within {START_S:.0f} s",
        met=None if quick else ratio >= LEAST_RATIO and ray.start_s <= START_S,
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
