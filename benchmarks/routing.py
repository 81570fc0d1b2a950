"""Microseconds per routing choice, against the target of 5 at 64 replicas.

    python benchmarks/routing.py [--json] [--quick] [--case sticky-64 ...]

Requests are those of multi-turn work: groups of 8 sessions of 5 turns, 4,096 sessions at once, in random order. Loads
change after every burst of 16 choices, so that some sessions find their replica overloaded. One thread; its CPU time
over whole bursts, so that neither a busy machine nor the clock is in the figure; median of several runs.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from kit import parse_options, report

from tailrace.generation.router.policies import LeastLoaded, RoutingPolicy, Sticky

TARGET_US = 5.0
REPLICAS = (4, 64)
POLICIES: dict[str, type[RoutingPolicy]] = {"sticky": Sticky, "least_loaded": LeastLoaded}
SESSIONS, GROUP_SIZE, TURNS = 4096, 8, 5
BURST = 16


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    replicas: int
    choices: int
    choice_us: float
    """Median of the runs."""
    worst_us: float
    """Of the slowest run."""
    moved_share: float
    """Share of later turns that left their session's replica."""
    target: float
    met: bool


def main() -> None:
    options = parse_options(__doc__)
    names = [f"{policy}-{replicas}" for policy in POLICIES for replicas in REPLICAS]
    rows = []
    for name in options.choose(names):
        policy, _, replicas = name.rpartition("-")
        rows.append(run_case(name, policy, int(replicas), runs=3 if options.quick else 20))
    report("Routing", rows, options)


def run_case(name: str, policy: str, replicas: int, runs: int) -> Row:
    turns = [(f"session {n}", f"group {n // GROUP_SIZE}") for n in range(SESSIONS) for _ in range(TURNS)]
    random.Random(0).shuffle(turns)
    found = [choose_all(POLICIES[policy](), turns, replicas) for _ in range(runs)]
    times_us = [spent_s / len(turns) * 1e6 for spent_s, _ in found]
    moved_share = found[0][1] / (SESSIONS * (TURNS - 1))
    choice_us = statistics.median(times_us)
    met = choice_us < TARGET_US
    return Row(name, replicas, len(turns), choice_us, max(times_us), moved_share, TARGET_US, met)


def choose_all(policy: RoutingPolicy, turns: list[tuple[str, str]], replicas: int) -> tuple[float, int]:
    """CPU seconds in `choose`, and how many choices left the session's replica."""
    loads, homes, moved, spent_s = [0.0] * replicas, dict[str, int](), 0, 0.0
    for first in range(0, len(turns), BURST):
        burst = turns[first : first + BURST]
        since_s = time.thread_time()
        chosen = [policy.choose(session, group, loads) for session, group in burst]
        spent_s += time.thread_time() - since_s
        for number, ((session, _), home) in enumerate(zip(burst, chosen, strict=True), start=first):
            assert home is not None
            moved += homes.get(session, home) != home
            homes[session] = home
            loads[home] += 0.05
            loads[number % replicas] *= 0.9
    return spent_s, moved


if __name__ == "__main__":
    main()
