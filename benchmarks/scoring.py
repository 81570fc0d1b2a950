"""How far scoring hides behind generation: the time to 32 scored groups, against the least that is possible.

    python benchmarks/scoring.py [--json] [--quick] [--case judge-8 ...]

32 groups of 8 rollouts whose latencies are lognormal (sigma 0.8, median 1 s), and a judge of so many seconds per group,
so many groups at once. `judge-*` runs in real time, everything 10 times shorter; `*-virtual` at full scale on the
virtual-time loop, where ours takes no time of its own. Times are medians over seeds, in the case's own seconds.

    two phases   all rollouts, then all judging: what a barrier costs
    bound        the later of: the last rollout plus one judge call; all judging, started with the first complete group
    overhead     CPU time of `stream_groups` over bare `asyncio.gather` of the same sleeps, per rollout: medians of runs
                 that take turns, 100 times shorter than the case
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kit import parse_options, progress, report

import tailrace
from tailrace.simulation.virtual_time import run_in_virtual_time

GROUPS, GROUP_SIZE = 32, 8
SIGMA, MEDIAN_S = 0.8, 1.0
REAL_SCALE, OVERHEAD_SCALE = 0.1, 0.01
MAX_OVER_BOUND, MAX_FIRST_SHARE, MAX_OVERHEAD_S = 1.05, 0.4, 60e-6
Latencies = list[list[float]]


@dataclass(frozen=True)
class Case:
    judge_s: float
    at_once: int
    virtual: bool = False


CASES = {
    "judge-8": Case(0.5, 8),
    "judge-32": Case(2.0, 32),
    "judge-8-virtual": Case(0.5, 8, virtual=True),
    "judge-32-virtual": Case(2.0, 32, virtual=True),
}


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    two_phase_s: float
    ours_s: float
    bound_s: float
    over_bound: float
    """Median of ours over bound."""
    first_8_groups_s: float
    first_8_share: float
    """Median of its share of our total."""
    overhead_s_per_rollout: float
    target: str
    met: bool


def main() -> None:
    options = parse_options(__doc__)
    overhead_s = measure_overhead(runs=11 if options.quick else 41)
    rows = [run_case(name, overhead_s, seeds=3 if options.quick else 9) for name in options.choose(list(CASES))]
    report("Scoring", rows, options)


def run_case(name: str, overhead_s: float, seeds: int) -> Row:
    case = CASES[name]
    scale = 1.0 if case.virtual else REAL_SCALE
    run = run_in_virtual_time if case.virtual else asyncio.run
    figures = []
    for seed in range(seeds):
        progress(f"{name}: seed {seed}")
        latencies = draw(seed, scale)
        judge = Judge(case.judge_s * scale, case.at_once)
        ours_s, first_8_s = run(ours(latencies, judge))
        figures.append((run(two_phases(latencies, judge)), ours_s, bound(latencies, judge), first_8_s))
    two_phase_s, ours_s, bound_s, first_8_s = (statistics.median(column) for column in zip(*figures, strict=True))
    over_bound = statistics.median(ours_s / bound_s for _, ours_s, bound_s, _ in figures)
    share = statistics.median(first_8_s / ours_s for _, ours_s, _, first_8_s in figures)
    met = over_bound <= MAX_OVER_BOUND and share < MAX_FIRST_SHARE and overhead_s < MAX_OVERHEAD_S
    target = f"over bound <= {MAX_OVER_BOUND}, first 8 < {MAX_FIRST_SHARE}, overhead < {MAX_OVERHEAD_S * 1e6:.0f} us"
    return Row(name, two_phase_s, ours_s, bound_s, over_bound, first_8_s, share, overhead_s, target, met)


@dataclass(frozen=True)
class Judge:
    seconds: float
    at_once: int


def draw(seed: int, scale: float) -> Latencies:
    rng = random.Random(seed)
    median_s = MEDIAN_S * scale
    return [[median_s * rng.lognormvariate(0.0, SIGMA) for _ in range(GROUP_SIZE)] for _ in range(GROUPS)]


def bound(latencies: Latencies, judge: Judge) -> float:
    """No schedule is faster: the last group needs its judging, and the judge its time from when it can begin."""
    ends_s = [max(group) for group in latencies]
    return max(max(ends_s) + judge.seconds, min(ends_s) + len(latencies) * judge.seconds / judge.at_once)


async def ours(latencies: Latencies, judge: Judge) -> tuple[float, float]:
    """Seconds to all groups, and to the first eight."""
    clock = asyncio.get_running_loop().time
    since = clock()
    groups = tailrace.stream_groups(
        player(latencies),
        [{}] * len(latencies),
        group_size=GROUP_SIZE,
        score_group=judging(judge),
        score_concurrency=judge.at_once,
    )
    done_s = [clock() - since async for _ in groups]
    return done_s[-1], done_s[7]


async def two_phases(latencies: Latencies, judge: Judge) -> float:
    """Seconds with a barrier between rollouts and judging."""
    clock, places = asyncio.get_running_loop().time, asyncio.Semaphore(judge.at_once)
    since = clock()
    await asyncio.gather(*(asyncio.sleep(latency_s) for group in latencies for latency_s in group))

    async def ask() -> None:
        async with places:
            await asyncio.sleep(judge.seconds)

    await asyncio.gather(*(ask() for _ in latencies))
    return clock() - since


def player(latencies: Latencies) -> Callable[[tailrace.Rollout], Awaitable[float]]:
    async def play(rollout: tailrace.Rollout) -> float:
        group, _, place = rollout.rollout_id.partition(".")
        await asyncio.sleep(latencies[int(group)][int(place)])
        return 1.0

    return play


def judging(judge: Judge) -> Callable[[tailrace.Group], Awaitable[tailrace.Group]]:
    async def score(group: tailrace.Group) -> tailrace.Group:
        await asyncio.sleep(judge.seconds)
        return group

    return score


def measure_overhead(runs: int) -> float:
    """Seconds of CPU per rollout beyond bare `asyncio.gather`, judging left out of neither."""
    progress("overhead")
    case = CASES["judge-32"]
    judge, latencies = Judge(case.judge_s * OVERHEAD_SCALE, case.at_once), draw(0, OVERHEAD_SCALE)
    spent: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(runs):
        for name, run in (("ours", ours(latencies, judge)), ("bare", two_phases(latencies, judge))):
            gc.collect()
            since = time.process_time()
            asyncio.run(run)
            spent[name].append(time.process_time() - since)
    return (statistics.median(spent["ours"]) - statistics.median(spent["bare"])) / (GROUPS * GROUP_SIZE)


if __name__ == "__main__":
    main()
