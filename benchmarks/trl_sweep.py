"""How to set TRL up for the workloads of `vs_trl.py`: one setting after another, the best of each kept for the next.

    make bench-trl-env                       # once: TRL in an environment of its own
    python benchmarks/trl_sweep.py [--json] [--quick] [--case natural-float32 ...]

From TRL's own defaults on: glibc's allocator as Tailrace sets its own, per-device batches of 4 to 64 (accumulated up to
64), generations of 1, 4, one optimizer step's and four optimizer steps' passes, eager attention (at the best batch, at
4 and at 16, since which batch is best depends on it), continuous batching; last, the other allocator with the best of
all these. Figures are trained completion tokens over CPU time, one thread; every candidate makes four optimizer steps,
so that all of them train what they generated. One measurement wavers by some percent, so the best three run twice more,
in turns, and the best median is the best. By default the two natural workloads; a case takes 5 to 10 min, with
`--quick` one optimizer step each of the shortest, of which a longer generation's tokens count as far as they train.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before torch

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks.peers import TRL_DEFAULTS, Tuning, require_peer, run_peer
from benchmarks.vs_trl import BATCH_SIZE, TARGETS, speed_job

STEPS, FINALISTS, FINAL_TURNS = 4, 3, 2


@dataclass(frozen=True)
class Row:
    """One candidate."""

    case: str
    micro_batch: int
    steps_per_generation: int
    attention: str
    continuous_batching: bool
    has_our_allocator: bool
    runs: int
    tokens_per_cpu_s: float | None
    """Median over runs; None where TRL could not run it."""
    range: str
    over_defaults: float | None
    best: bool = False


def candidates(best: Tuning, setting: str) -> Iterator[Tuning]:
    """What to try for one setting, beside the best so far."""
    passes = BATCH_SIZE // best.micro_batch
    values: dict[str, list[object]] = {
        "has_our_allocator": [True],
        "micro_batch": [4, 16, 32, 64],
        "steps_per_generation": sorted({1, 4, 4 * passes} - {passes}),
        "continuous_batching": [True],
    }
    if setting == "attention":
        for size in sorted({4, 16, best.micro_batch}):
            yield replace(with_batch(best, size), attention="eager")
    else:
        for value in values[setting]:
            yield replace(best, **{setting: value})


def with_batch(tuning: Tuning, micro_batch: int) -> Tuning:
    """The same with another batch per device; a generation is of as many rollouts."""
    passes = tuning.steps_per_generation
    if passes is not None:
        passes = max(1, passes * tuning.micro_batch // micro_batch)
    return replace(tuning, micro_batch=micro_batch, steps_per_generation=passes)


SETTINGS = ("has_our_allocator", "micro_batch", "steps_per_generation", "attention", "continuous_batching")


def sweep(case: str, folder: Path, steps: int) -> list[Row]:
    """The rows of one workload, the best one marked."""
    workload, _, precision = case.partition("-")
    job = speed_job(workload, precision, folder, steps)
    rates: dict[Tuning, list[float]] = {}
    number = itertools.count()

    def measure(tuning: Tuning) -> None:
        done = rates.setdefault(tuning, [])
        try:
            done.append(run_peer(job, folder, f"{case}-{next(number)}", tuning).tokens_per_cpu_s)
        except SystemExit as failure:
            progress(str(failure)[-600:])
        progress(f"{case}: {done} with {tuning}")

    def rate(tuning: Tuning) -> float:
        if tuning not in rates:
            measure(tuning)
        return statistics.median(rates[tuning] or [0.0])

    best = TRL_DEFAULTS
    for setting in SETTINGS:
        best = max([best, *candidates(best, setting)], key=rate)
    rate(replace(best, has_our_allocator=not best.has_our_allocator))
    finalists = sorted(rates, key=rate, reverse=True)[:FINALISTS]
    for tuning in finalists * FINAL_TURNS:
        measure(tuning)
    best = max(finalists, key=rate)
    return [row(case, tuning, runs, rate(TRL_DEFAULTS), tuning == best) for tuning, runs in rates.items()]


def row(case: str, tuning: Tuning, runs: list[float], defaults: float, is_best: bool) -> Row:
    settings = asdict(tuning)
    settings["steps_per_generation"] = tuning.steps_per_generation or BATCH_SIZE // tuning.micro_batch
    del settings["threads"]
    found = statistics.median(runs) if runs else None
    spread = f"{min(runs):,.0f} to {max(runs):,.0f}" if runs else ""
    over = found / defaults if found and defaults else None
    return Row(case, **settings, runs=len(runs), tokens_per_cpu_s=found, range=spread, over_defaults=over, best=is_best)


def main() -> None:
    options = parse_options(__doc__)
    require_peer()
    names = [f"{workload}-{precision}" for workload, precision in TARGETS]
    chosen = options.choose(names)
    if not options.cases:
        chosen = ["fixed-float32"] if options.quick else [name for name in names if name.startswith("natural")]
    with tempfile.TemporaryDirectory(prefix="tailrace-trl-sweep-") as temporary:
        steps = 1 if options.quick else STEPS
        rows = [row for name in chosen for row in sweep(name, Path(temporary), steps)]
    report("TRL's settings", rows, options)


if __name__ == "__main__":
    main()
