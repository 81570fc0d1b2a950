"""What an orchestrator of many replicas costs: CPU share, memory and the longest turns of its event loop.

    python benchmarks/scale.py [--json] [--quick] [--case replicas-1024 ...]

`replicas-N`: the simulator's run (the real scheduler, rollouter, router, batching, staleness and ledger in virtual
time) over N modelled engines of 256 slots, all of them taken: 16,384 rollouts in flight at 64 replicas, 262,144 at
1,024. A batch is a quarter of that. Lengths are lognormal, 828 tokens in the mean, 16,384 at most; an engine's step of
256 requests takes 92 ms; the trainer is a little faster than the engines.

CPU time is that of the thread, less what the modelled engines, drawn lengths and arrays of tokens took, which stand for
other processes. `cpu_share` is that over virtual time: the share of a core that these parts would take of an
orchestrator in real time. Chat rendering, RPC, metrics, traces and files are not among them: the row `run-1024` of
`scheduler_overhead.py` has all of it, for each rollout. `turn_max_s` is the most CPU time that one turn of the event
loop took after warm-up, which is how late anything else on that loop can be; `fill_turn_max_s` the same before, the
admission of all rollouts included; both are of a second run, since watching turns costs time. `peak_rss_bytes` is of
the whole process, the modelled engines in it. `rollouts_per_core_s` is what one core can do at most.

Targets: a rollout costs at most 1.5 times what it costs at 8 replicas, and no turn takes 50 ms. Judged where
`replicas-8` runs too.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import json
import math
import random
import resource
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.lifecycle.memory import reserve_memory
from tailrace.scheduling import SchedulingSettings
from tailrace.simulation.engine_model import EngineModel
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.metering import SimulationObserver
from tailrace.simulation.replica import ModelledReplica
from tailrace.simulation.run import SimulatedRun, Simulation
from tailrace.simulation.settings import EngineSettings, LoadSettings, ModelledTrainerSettings, SimulationPlan
from tailrace.simulation.trainer import ModelledTrainer
from tailrace.simulation.virtual_time import VirtualTimeLoop

REPLICAS = (8, 64, 256, 1024)
QUICK = (8, 64)
SMALLEST = f"replicas-{REPLICAS[0]}"
SLOTS, GROUP_SIZE = 256, 8
WARMUP_STEPS = 2
SAMPLED = 32
"""One call in so many of what is modelled is timed, where turns are not watched: asking for the time costs 3 us."""
TARGET_RATIO, TARGET_TURN_S = 1.5, 0.050
MODELLED = {
    EngineModel: ("add", "abort", "advance", "begin_load", "next_event_s", "statistics"),
    LengthSource: ("draw",),
    ModelledReplica: ("_sampled",),
    ModelledTrainer: ("_require_trainable",),
    SimulationObserver: ("_count",),
    Simulation: ("_totals",),
}
"""What stands for other processes."""
PHASES: defaultdict[int, float] = defaultdict(lambda: len(PHASES) * 0.618 % 1.0)
"""Of replicas, by identity."""


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    in_flight: int
    rollouts: int
    """Trained after warm-up."""
    rollouts_per_s: float
    cpu_s_per_rollout: float
    cpu_share: float
    rollouts_per_core_s: float
    turn_max_s: float
    turn_p999_s: float
    fill_turn_max_s: float
    peak_rss_bytes: int
    rss_bytes_per_rollout: float
    ratio: float | None
    """CPU time of a rollout over that of the smallest case; None where that did not run."""
    met: bool | None


@dataclass(frozen=True)
class Figures:
    """Of one run, after warm-up."""

    rollouts: int
    virtual_s: float
    cpu_s: float
    turn_max_s: float
    turn_p999_s: float
    fill_turn_max_s: float
    peak_rss_bytes: int


class Stopwatch:
    """CPU time of the functions that it times: of every call, or of one in `every` at random, the outermost alone."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._drawn = random.Random(0).random
        self._calls = self._depth = 0
        """Calls that were timed, and whether one is under way."""
        self._measured_s = 0.0
        self._own_s = self._calibrated()

    @property
    def cpu_s(self) -> float:
        """Of all calls; what timing them cost is not in it."""
        return self._measured_s * self._every

    @property
    def timing_s(self) -> float:
        """What timing them cost whoever called."""
        return self._calls * self._own_s

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted."""

        @wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            if self._depth:
                return function(*args, **named)
            if self._every > 1 and self._drawn() > 1 / self._every:
                self._depth = 1
                try:
                    return function(*args, **named)
                finally:
                    self._depth = 0
            self._calls += 1
            self._depth, since = 1, time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self._measured_s += time.thread_time() - since
                self._depth = 0

        return counted

    def _calibrated(self) -> float:
        """What one timed call of nothing costs, beside what is measured of it."""
        self._own_s, every, self._every = 0.0, self._every, 1
        nothing, since = self.timed(lambda: None), time.thread_time()
        for _ in range(20_000):
            nothing()
        own_s = (time.thread_time() - since - self._measured_s) / 20_000
        self._calls, self._measured_s, self._every = 0, 0.0, every
        return own_s


class WatchedLoop(VirtualTimeLoop):
    """Notes the CPU time of every turn, less what the stopwatch counted in it.

    A turn begins when the selector has answered: before it, asyncio's own loop now and then rebuilds its heap of
    timers, which takes 90 ms with 32,768 of them. Runs have uvloop, which does not.
    """

    def __init__(self, modelled: Stopwatch) -> None:
        super().__init__()
        self.turns_s = array("d")
        self._modelled = modelled
        self._since_s = 0.0

    def _own_s(self) -> float:
        return time.thread_time() - self._modelled.cpu_s - self._modelled.timing_s

    def _process_events(self, events: Any) -> None:
        super()._process_events(events)  # type: ignore[misc]
        self._since_s = self._own_s()

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.turns_s.append(self._own_s() - self._since_s)


def plan(replicas: int, *, quick: bool) -> SimulationPlan:
    """All slots taken, and a trainer that keeps up."""
    in_flight = replicas * SLOTS
    batch_size = in_flight // 4
    engines = EngineSettings(replicas=replicas, slots=SLOTS, kv_capacity_tokens=SLOTS * 16_384)
    generating_s = batch_size * 828 / engines.tokens_per_s
    return SimulationPlan(
        name=f"replicas-{replicas}",
        steps=WARMUP_STEPS + max(2 if quick else 5, (10_000 if quick else 40_000) // batch_size),
        warmup_steps=WARMUP_STEPS,
        engines=engines,
        trainer=ModelledTrainerSettings(train_s=0.8 * generating_s, sync_s=2.0, sync_holds_trainer=False),
        load=LoadSettings(group_size=GROUP_SIZE),
        scheduling=SchedulingSettings(batch_size=batch_size, row_tokens=32_768, max_staleness=8),
    )


def next_report_s(self: ModelledReplica) -> float:
    """At a phase of its own, as of processes that were started one by one. Modelled replicas all report at once."""
    phase, every_s = PHASES[id(self)], self._report_every_s
    return (math.floor(self._now() / every_s - phase + 1e-6) + 1 + phase) * every_s


def run_once(case: SimulationPlan, *, with_turns: bool) -> Figures:
    """One run, in this process, which has no other."""
    modelled = Stopwatch(every=1 if with_turns else SAMPLED)
    for owner, names in MODELLED.items():
        for name in names:
            setattr(owner, name, modelled.timed(getattr(owner, name)))
    ModelledReplica._next_report_s = next_report_s  # type: ignore[method-assign]
    reserve_memory(case.max_running)
    loop = WatchedLoop(modelled) if with_turns else VirtualTimeLoop()
    marks: list[tuple[float, int]] = []

    class Marked(Simulation):
        def _step_ended(self, event: Any) -> None:
            if event.step in (case.warmup_steps, case.steps):
                cpu_s = time.thread_time() - modelled.cpu_s - modelled.timing_s
                marks.append((cpu_s, len(loop.turns_s) if isinstance(loop, WatchedLoop) else 0))
            super()._step_ended(event)

    async def simulated() -> SimulatedRun:
        return await Marked(case).run()

    with hold_old_objects(case.max_running), asyncio.Runner(loop_factory=lambda: loop) as runner:
        run = runner.run(simulated())
    (since_s, first), (until_s, last) = marks
    turns = np.asarray(loop.turns_s if isinstance(loop, WatchedLoop) else [0.0, 0.0])
    return Figures(
        rollouts=run.measured.trained_rollouts,
        virtual_s=run.measured.time_s,
        cpu_s=until_s - since_s,
        turn_max_s=float(turns[first:last].max()) if with_turns else 0.0,
        turn_p999_s=float(np.percentile(turns[first:last], 99.9)) if with_turns else 0.0,
        fill_turn_max_s=float(turns[:first].max()) if with_turns else 0.0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def measure(replicas: int, *, quick: bool) -> Row:
    """Each run in a process of its own, so that the peak of memory is its own."""
    case = plan(replicas, quick=quick)
    cost, lag = (apart(replicas, quick=quick, with_turns=with_turns) for with_turns in (False, True))
    return Row(
        case=case.name,
        in_flight=case.max_running,
        rollouts=cost.rollouts,
        rollouts_per_s=cost.rollouts / cost.virtual_s,
        cpu_s_per_rollout=cost.cpu_s / cost.rollouts,
        cpu_share=cost.cpu_s / cost.virtual_s,
        rollouts_per_core_s=cost.rollouts / cost.cpu_s,
        turn_max_s=lag.turn_max_s,
        turn_p999_s=lag.turn_p999_s,
        fill_turn_max_s=lag.fill_turn_max_s,
        peak_rss_bytes=cost.peak_rss_bytes,
        rss_bytes_per_rollout=cost.peak_rss_bytes / case.max_running,
        ratio=None,
        met=None,
    )


def apart(replicas: int, *, quick: bool, with_turns: bool) -> Figures:
    call = [sys.executable, __file__, "--one", str(replicas), *(["--quick"] if quick else [])]
    found = subprocess.run([*call, *(["--turns"] if with_turns else [])], stdout=subprocess.PIPE, text=True, check=True)
    return Figures(**json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--one", type=int, help="run so many replicas in this process, and print the figures alone")
    parser.add_argument("--turns", action="store_true", help="with --one: watch the turns of the loop")
    arguments = parser.parse_args()
    if arguments.one:
        figures = run_once(plan(arguments.one, quick=arguments.quick), with_turns=arguments.turns)
        print(json.dumps(asdict(figures)))
        return
    options = kit.common_options(arguments)
    cases = {f"replicas-{count}": count for count in REPLICAS}
    chosen = options.choose(list(cases))
    if options.quick and not options.cases:
        chosen = [f"replicas-{count}" for count in QUICK]
    rows = []
    for name in chosen:
        kit.progress(name)
        rows.append(measure(cases[name], quick=options.quick))
    kit.report("Scale", judged(rows), options)


def judged(rows: Sequence[Row]) -> list[Row]:
    """Against the smallest of all cases; without it nothing is judged."""
    smallest = next((row.cpu_s_per_rollout for row in rows if row.case == SMALLEST), None)
    if smallest is None:
        return [*rows]
    ratios = [row.cpu_s_per_rollout / smallest for row in rows]
    return [
        replace(row, ratio=ratio, met=ratio <= TARGET_RATIO and row.turn_max_s < TARGET_TURN_S)
        for row, ratio in zip(rows, ratios, strict=True)
    ]


if __name__ == "__main__":
    main()
