"""Thousands of small clusters in which everything fails that may, each checked when it ended.

    python benchmarks/fault_search.py [--seeds 10000] [--first 0] [--json] [--quick]
    python benchmarks/fault_search.py --seed 1234                   # replays one, event for event

Replicas die and come back, environments fail, hang and dawdle, judges fail, hang, discard and split groups, steps are
skipped, the trainer restarts, replicas hand their requests back, the whole run is killed and resumed; every policy of
the scheduler is drawn. The laws that must hold are those of `tailrace.simulation.faults`. Ends with status 1 where one
does not.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tailrace.simulation.faults import check_seed, draw_scenario, run_scenario

SEEDS, QUICK_SEEDS, CHUNK = 2000, 300, 25


@dataclass(frozen=True)
class Row:
    """The figures of a search."""

    case: str
    seeds: int
    broken: int
    cpu_s_per_seed: float
    wall_s: float
    target: int
    met: bool


def main() -> int:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    logging.disable()
    if arguments.seed is not None:
        return replay(arguments.seed)
    count = min(arguments.seeds, QUICK_SEEDS) if options.quick else arguments.seeds
    since_s = time.perf_counter()
    broken, cpu_s = search(range(arguments.first, arguments.first + count))
    row = Row("faults", count, broken, cpu_s / count, time.perf_counter() - since_s, 0, broken == 0)
    kit.report("Fault search", [row], options)
    return int(broken > 0)


def search(seeds: range) -> tuple[int, float]:
    """How many seeds break a law, and CPU seconds."""
    broken, cpu_s, done = 0, 0.0, 0
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for found, spent_s in pool.map(check, chunks):
            cpu_s += spent_s
            done += CHUNK
            for seed, what in found:
                broken += 1
                kit.progress(f"{what}\n  again: python benchmarks/fault_search.py --seed {seed}")
            if done % (40 * CHUNK) == 0:
                kit.progress(f"{done:,} seeds, {broken} broken")
    return broken, cpu_s


def check(seeds: range) -> tuple[list[tuple[int, str]], float]:
    since_s = time.process_time()
    logging.disable()
    found = [(seed, what) for seed in seeds if (what := check_seed(seed)) is not None]
    return found, time.process_time() - since_s


def replay(seed: int) -> int:
    """Print the scenario, its events and what is broken."""
    scenario = draw_scenario(seed)
    print(scenario)
    broken, journal = run_scenario(scenario, keep_journal=True)
    print("\n".join(journal))
    print("\n".join(broken) or "every law holds")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
