"""How to set TRL up for the workloads of `vs_trl.py`: one setting after another, the best of each kept for the next.

    make bench-trl-env                       # once: TRL in an environment of its own
    python benchmarks/trl_sweep.py [--json] [--quick] [--case natural-float32 ...]

From TRL's own defaults on: glibc's allocator as Tailrace sets its own, per-device batches of 8 to 64 (accumulated up to
64), generations of 1, 4, one optimizer step's and four optimizer steps' passes, attention, continuous batching. Figures
are trained completion tokens over CPU time, one thread; every candidate makes four optimizer steps, so that all of them
train what they generated. By default the two natural workloads; a case takes 5 to 10 min, with `--quick` one
optimizer step each of the shortest.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before torch

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks.peers import TRL_DEFAULTS, Tuning, require_peer, run_peer
from benchmarks.vs_trl import BATCH_SIZE, TARGETS, speed_job

STEPS = 4


@dataclass(frozen=True)
class Row:
    """One candidate."""

    case: str
    micro_batch: int
    steps_per_generation: int
    attention: str
    continuous_batching: bool
    has_our_allocator: bool
    tokens_per_cpu_s: float | None
    """None where TRL could not run it."""
    over_defaults: float | None
    best: bool = False


def candidates(best: Tuning, setting: str) -> Iterator[Tuning]:
    """What to try for one setting, beside the best so far."""
    passes = BATCH_SIZE // best.micro_batch
    values: dict[str, list[object]] = {
        "has_our_allocator": [True],
        "micro_batch": [16, 32, 64],
        "steps_per_generation": sorted({1, 4, 4 * passes} - {passes}),
        "attention": ["eager"],
        "continuous_batching": [True],
    }
    for value in values[setting]:
        yield replace(best, **{setting: value})


SETTINGS = ("has_our_allocator", "micro_batch", "steps_per_generation", "attention", "continuous_batching")


def sweep(case: str, folder: Path, steps: int) -> list[Row]:
    """The rows of one workload, the best one marked."""
    workload, _, precision = case.partition("-")
    job = speed_job(workload, precision, folder, steps)
    rates: dict[Tuning, float | None] = {}

    def rate(tuning: Tuning) -> float:
        if tuning not in rates:
            try:
                rates[tuning] = run_peer(job, folder, f"{case}-{len(rates)}", tuning).tokens_per_cpu_s
            except SystemExit as failure:
                progress(str(failure)[-600:])
                rates[tuning] = None
            progress(f"{case}: {rates[tuning]} with {tuning}")
        return rates[tuning] or 0.0

    best = TRL_DEFAULTS
    for setting in SETTINGS:
        best = max([best, *candidates(best, setting)], key=rate)
    return [row(case, tuning, found, rates[TRL_DEFAULTS], tuning == best) for tuning, found in rates.items()]


def row(case: str, tuning: Tuning, found: float | None, defaults: float | None, is_best: bool) -> Row:
    settings = asdict(tuning)
    settings["steps_per_generation"] = tuning.steps_per_generation or BATCH_SIZE // tuning.micro_batch
    del settings["threads"]
    over = found / defaults if found and defaults else None
    return Row(case, **settings, tokens_per_cpu_s=found, over_defaults=over, best=is_best)


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
