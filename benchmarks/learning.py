"""What the quickstart learns by schedule and by loss: held-out reward over steps, three seeds each.

    python benchmarks/learning.py [--json] [--quick] [--case cispo ...] [--seeds 3] [--steps 160] [--runs FOLDER]

`sync` waits for each batch's own weights, 64 rollouts at a time. All others stream: 256 rollouts at a time, four
steps' worth, so that tokens are about two versions old when they are trained on. `stream` corrects for it by truncated
importance weights, the default; `uncorrected` doesn't; `cispo` and `ipo` are other losses. Only what is named differs.

Rewards are of temperature 1 on 200 held-out tasks: means over seeds, and the lowest and highest. `reward_half` is
measured from half-way on, while training goes on. A run that fails, since its policy collapsed, counts with what it had
come to: `finished` tells how many did not. `effective_sample_share` is of the importance weights, over all steps. By
default two seeds take 60 steps, in some 8 minutes. `--runs` keeps the runs' folders, for `tools/draw_held_out.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kit  # isort: skip  - before NumPy: pins threads

import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass

from benchmarks.quickstart_runs import metric, summary_of, train_quickstart

STREAM = ("--generator.slots", "256")
CASES = {
    "sync": ("--schedule", "sync"),
    "stream": STREAM,
    "uncorrected": (*STREAM, "--trainer.loss.correction", "none"),
    "cispo": (*STREAM, "--trainer.loss.name", "cispo"),
    "ipo": (*STREAM, "--trainer.loss.name", "ipo"),
}
HELD_OUT = "eval/alphabet-sort/reward/mean"
TASKS, QUICK_TASKS = 200, 16
SEEDS, STEPS, QUICK_STEPS = 2, 60, 4
EVALUATIONS = 4


@dataclass(frozen=True)
class Row:
    """One case: means over its seeds."""

    case: str
    seeds: int
    steps: int
    finished: int
    """Of the seeds."""
    reward_half: float
    reward_after: float
    reward_after_range: str
    staleness_mean: float
    masked_share: float
    effective_sample_share: float | None
    wall_s: float
    target: None = None
    met: None = None


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each case")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    seeds, steps = (1, QUICK_STEPS) if options.quick else (arguments.seeds, arguments.steps)
    tasks = QUICK_TASKS if options.quick else TASKS
    keep = arguments.runs
    with tempfile.TemporaryDirectory(prefix="tailrace-learning-") if keep is None else nullcontext(keep) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        rows = [learn(case, Path(folder), seeds=seeds, steps=steps, tasks=tasks) for case in options.choose(CASES)]
    kit.report("Learning", rows, options)


def learn(case: str, folder: Path, *, seeds: int, steps: int, tasks: int) -> Row:
    """Train every seed."""
    every = ("--evaluation.every_steps", str(steps // EVALUATIONS), "--evaluation.tasks", str(tasks))
    runs = []
    for seed in range(seeds):
        name = f"{case}-{seed}"
        overrides = (*CASES[case], *every)
        runs.append(train_quickstart(folder, name, seed=seed, steps=steps, overrides=overrides, may_fail=True))
        kit.progress(f"{name}: {metric(runs[-1], HELD_OUT)[-1]:.3f}")
    summaries = [summary_of(run) for run in runs]
    rewards = [metric(run, HELD_OUT) for run in runs]
    shares = [share for run in runs for share in metric(run, "training/effective_sample_share")]
    after = [values[-1] for values in rewards]
    return Row(
        case=case,
        seeds=seeds,
        steps=steps,
        finished=sum(summary["status"] == "finished" for summary in summaries),
        reward_half=statistics.fmean(values[min(EVALUATIONS // 2, len(values) - 1)] for values in rewards),
        reward_after=statistics.fmean(after),
        reward_after_range=f"{min(after):.3f} to {max(after):.3f}",
        staleness_mean=statistics.fmean(summary["staleness_mean"] for summary in summaries),
        masked_share=statistics.fmean(summary["masked_share"] for summary in summaries),
        effective_sample_share=statistics.fmean(shares) if shares else None,
        wall_s=statistics.fmean(summary["wall_s"] for summary in summaries),
    )


if __name__ == "__main__":
    main()
