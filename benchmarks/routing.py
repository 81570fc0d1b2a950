"""Microseconds per routing choice, against the target of 5 at 64 replicas.

    python benchmarks/routing.py [--json] [--quick] [--case sticky-64 ...]

Requests are those of multi-turn work: groups of 8 sessions of 5 turns, 4,096 sessions at once, in random order. Loads
change after every choice, so that some sessions find their replica overloaded. One thread; the fastest of several
runs, reading the clock included.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from kit import parse_options, report

from tailrace.generation.router.policies import LeastLoaded, RoutingPolicy, Sticky

TARGET_US = 5.0
REPLICAS = (4, 64)
POLICIES: dict[str, type[RoutingPolicy]] = {"sticky": Sticky, "least_loaded": LeastLoaded}
SESSIONS, GROUP_SIZE, TURNS = 4096, 8, 5


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    replicas: int
    choices: int
    choice_us: float
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
    best_s, moved = min(choose_all(POLICIES[policy](), turns, replicas) for _ in range(runs))
    choice_us = best_s / len(turns) * 1e6
    later = SESSIONS * (TURNS - 1)
    return Row(name, replicas, len(turns), choice_us, moved / later, TARGET_US, choice_us < TARGET_US)


def choose_all(policy: RoutingPolicy, turns: list[tuple[str, str]], replicas: int) -> tuple[float, int]:
    """Seconds in `choose`, and how many choices that left the session's replica."""
    loads, homes, moved, spent_s = [0.0] * replicas, dict[str, int](), 0, 0.0
    drain = iter(range(len(turns)))
    for session, group in turns:
        since = time.perf_counter()
        chosen = policy.choose(session, group, loads)
        spent_s += time.perf_counter() - since
        assert chosen is not None
        moved += homes.get(session, chosen) != chosen
        homes[session] = chosen
        loads[chosen] += 0.05
        loads[next(drain) % replicas] *= 0.9
    return spent_s, moved


if __name__ == "__main__":
    main()
