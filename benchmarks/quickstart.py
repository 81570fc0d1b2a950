"""The quickstart as a newcomer runs it: held-out reward before, training, held-out reward after.

    python benchmarks/quickstart.py [--json] [--quick]

Runs `tailrace eval quickstart`, `tailrace train quickstart` and `tailrace eval` of the newest checkpoint, each as the
command it is. `wall_s` spans all three, starts of processes included. `peak_rss_bytes` is the highest sum of resident
memory over all processes of training; pages that they share count once for each. `--quick` trains a few steps only,
too few to learn, on a few held-out tasks, to see that everything runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before NumPy

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass

import psutil
from benchmarks.peers import TAILRACE, environment

REWARD_BEFORE, REWARD_AFTER, LIMIT_S = 0.4, 0.9, 180.0
QUICK_STEPS = 4
QUICK_TASKS = 16
SAMPLE_S = 0.2
"""Between two looks at the memory of all processes."""


@dataclass(frozen=True)
class Row:
    """The figures of one run."""

    case: str
    wall_s: float
    train_s: float
    steps: int
    heldout_reward_before: float
    heldout_reward_after: float
    peak_rss_bytes: int
    target: str
    met: bool | None
    """None where too few steps were taken to tell."""


def run_quickstart(folder: Path, *, quick: bool) -> Row:
    """Measure, train, measure."""
    few_tasks = ["--environment.eval_tasks", str(QUICK_TASKS)] if quick else []
    started_s = time.perf_counter()
    before = held_out_reward(folder, few_tasks)
    progress(f"before: {before:.3f}")
    train_started_s = time.perf_counter()
    few_steps = ["--max_steps", str(QUICK_STEPS)] if quick else []
    peak_rss_bytes = run_and_watch(folder, ["train", "quickstart", "--name", "quickstart", *few_steps])
    train_s = time.perf_counter() - train_started_s
    run = folder / "runs" / "quickstart"
    newest = max((run / "checkpoints").glob("step_*"))
    after = held_out_reward(folder, [*few_tasks, "--model.name", str(newest)])
    progress(f"after: {after:.3f}")
    wall_s = time.perf_counter() - started_s
    met = before < REWARD_BEFORE and after > REWARD_AFTER and train_s <= LIMIT_S
    return Row(
        case="quickstart",
        wall_s=wall_s,
        train_s=train_s,
        steps=int(json.loads((run / "summary.json").read_text())["steps"]),
        heldout_reward_before=before,
        heldout_reward_after=after,
        peak_rss_bytes=peak_rss_bytes,
        target=f"< {REWARD_BEFORE} to > {REWARD_AFTER} in {LIMIT_S:.0f} s of training",
        met=None if quick else met,
    )


def held_out_reward(folder: Path, overrides: list[str]) -> float:
    """Mean over the held-out tasks, by `tailrace eval`."""
    command = [str(TAILRACE), "eval", "quickstart", "--json", *overrides]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"tailrace eval failed:\n{(done.stdout + done.stderr)[-4000:]}")
    [figures] = json.loads(done.stdout.splitlines()[-1]).values()
    return float(figures["reward_mean"])


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
    options.choose(["quickstart"])
    with tempfile.TemporaryDirectory(prefix="tailrace-quickstart-") as folder:
        report("Quickstart", [run_quickstart(Path(folder), quick=options.quick)], options)


if __name__ == "__main__":
    main()
