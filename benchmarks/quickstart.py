"""The quickstart as a newcomer runs it: held-out reward before, training, held-out reward after, for five seeds.

    python benchmarks/quickstart.py [--json] [--quick] [--case seed-2 ...]

Runs `tailrace eval quickstart --greedy` once, then `tailrace train quickstart` and `tailrace eval` of its newest
checkpoint for every seed, each as the command it is. Rewards are of temperature 1 and of greedy decoding, on 200
held-out tasks of an `eval_seed` that the recipe was not tuned on. `train_s` is the wall time of training with its
start, `train_cpu_s` user and system time of all its processes, `peak_rss_bytes` the highest sum of their resident
memory; pages that they share count once for each. The last two rows are the median and the worst of the column.
`--quick` trains one seed for a few steps, too few to learn, on a few held-out tasks, to see that everything runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before NumPy

import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil
from benchmarks.peers import TAILRACE, environment

SEEDS = (0, 1, 2, 3, 4)
EVAL_SEED = 20261122
REWARD_BEFORE, REWARD_AFTER, LIMIT_S = 0.35, 0.9, 180.0
TARGET = f"below {REWARD_BEFORE} to above {REWARD_AFTER}, both, in {LIMIT_S:.0f} s"
QUICK_STEPS = 4
QUICK_TASKS = 16
SAMPLE_S = 0.2
"""Between two looks at the memory of all processes."""


@dataclass(frozen=True)
class HeldOut:
    """Mean rewards on the held-out tasks."""

    sampled: float
    greedy: float


@dataclass(frozen=True)
class Row:
    """The figures of one training seed, or the median or worst of all."""

    case: str
    steps: int
    train_s: float
    train_cpu_s: float
    sampled_before: float
    greedy_before: float
    sampled_after: float
    greedy_after: float
    peak_rss_bytes: int
    target: str
    met: bool | None
    """None where too few steps were taken to tell."""


def run_seed(folder: Path, seed: int, before: HeldOut, *, quick: bool) -> Row:
    """Train, and measure what came of it."""
    name = f"seed-{seed}"
    few_steps = ["--max_steps", str(QUICK_STEPS)] if quick else []
    cpu_before_s, started_s = children_cpu_s(), time.perf_counter()
    peak_rss_bytes = run_and_watch(folder, ["train", "quickstart", "--name", name, "--seed", str(seed), *few_steps])
    train_s, train_cpu_s = time.perf_counter() - started_s, children_cpu_s() - cpu_before_s
    run = folder / "runs" / name
    after = held_out(folder, ["--model.name", str(max((run / "checkpoints").glob("step_*")))], quick=quick)
    progress(f"{name}: {after.sampled:.3f}, greedy {after.greedy:.3f}, {train_s:.0f} s")
    return Row(
        case=name,
        steps=int(json.loads((run / "summary.json").read_text())["steps"]),
        train_s=train_s,
        train_cpu_s=train_cpu_s,
        sampled_before=before.sampled,
        greedy_before=before.greedy,
        sampled_after=after.sampled,
        greedy_after=after.greedy,
        peak_rss_bytes=peak_rss_bytes,
        target=TARGET,
        met=None if quick else has_learnt(before, after) and train_s <= LIMIT_S,
    )


def has_learnt(before: HeldOut, after: HeldOut) -> bool:
    """Whether both ways of decoding went from below the one bound to above the other."""
    return max(before.sampled, before.greedy) < REWARD_BEFORE and min(after.sampled, after.greedy) > REWARD_AFTER


Figures = Callable[[Iterable[float]], float]


def summed_up(case: str, rows: Sequence[Row], of_rewards: Figures, of_costs: Figures) -> Row:
    """One row over all seeds: a figure of their rewards, where more is better, and one of their costs."""
    return Row(
        case=case,
        steps=rows[0].steps,
        train_s=of_costs(row.train_s for row in rows),
        train_cpu_s=of_costs(row.train_cpu_s for row in rows),
        sampled_before=rows[0].sampled_before,
        greedy_before=rows[0].greedy_before,
        sampled_after=of_rewards(row.sampled_after for row in rows),
        greedy_after=of_rewards(row.greedy_after for row in rows),
        peak_rss_bytes=int(of_costs(row.peak_rss_bytes for row in rows)),
        target=TARGET,
        met=None if any(row.met is None for row in rows) else all(row.met for row in rows),
    )


def held_out(folder: Path, overrides: list[str], *, quick: bool) -> HeldOut:
    """Mean rewards over the held-out tasks, by `tailrace eval`."""
    tasks = ["--environment.args.eval_seed", str(EVAL_SEED), *(["--limit", str(QUICK_TASKS)] if quick else [])]
    command = [str(TAILRACE), "eval", "quickstart", "--json", "--greedy", *tasks, *overrides]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"tailrace eval failed:\n{(done.stdout + done.stderr)[-4000:]}")
    [figures] = json.loads(done.stdout.splitlines()[-1]).values()
    return HeldOut(float(figures["reward_mean"]), float(figures["greedy_reward_mean"]))


def children_cpu_s() -> float:
    """User and system time of all processes below this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_and_watch(folder: Path, arguments: list[str]) -> int:
    """Run the command to its end; the highest sum of its processes' resident memory."""
    log = folder / "train.log"
    peak = 0
    with log.open("w") as output:
        running = subprocess.Popen(
            [str(TAILRACE), *arguments], cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        while running.poll() is None:
            peak = max(peak, resident_bytes(running.pid))
            time.sleep(SAMPLE_S)
    if running.returncode:
        sys.exit(f"tailrace train failed:\n{log.read_text()[-4000:]}")
    return peak


def resident_bytes(pid: int) -> int:
    """Of a process and all below it; those that end meanwhile count nothing."""
    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> None:
    options = parse_options(__doc__)
    chosen = options.choose([f"seed-{seed}" for seed in SEEDS])
    with tempfile.TemporaryDirectory(prefix="tailrace-quickstart-") as temporary:
        folder = Path(temporary)
        before = held_out(folder, [], quick=options.quick)
        progress(f"before: {before.sampled:.3f}, greedy {before.greedy:.3f}")
        seeds = [seed for seed in SEEDS if f"seed-{seed}" in chosen][: 1 if options.quick else None]
        rows = [run_seed(folder, seed, before, quick=options.quick) for seed in seeds]
    over_all = [
        summed_up("median", rows, statistics.median, statistics.median),
        summed_up("worst", rows, min, max),
    ]
    report("Quickstart", [*rows, *over_all], options)


if __name__ == "__main__":
    main()
