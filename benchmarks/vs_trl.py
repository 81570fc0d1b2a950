"""Tailrace against TRL's GRPOTrainer: the same model, tasks, group size, lengths and precision, one thread per process.

    make bench-trl-env                       # once: TRL in an environment of its own
    python benchmarks/vs_trl.py [--json] [--quick] [--case fixed-float32 ...]

Speed. A Qwen3 of 3.4 million parameters, 8 tasks x 8 rollouts per step, a reward that costs nothing, and a learning
rate so low that lengths stay what they are. `fixed`: 64 tokens each, none ends earlier. `natural`: every token is the
last one with the same probability (see `small_model.py`), mean 200, cut at 256. Figures are trained completion tokens
over user and system CPU of all processes, from the first rollout to the last step, start-up left out on both sides;
`wall_ratio` compares tokens per second of wall time, with Tailrace on two cores and TRL, which takes turns, on one.
TRL generates the 64 rollouts of a step together, with a cache, and trains on all of them in one pass, without a
reference model; its bf16 is autocast over float32 weights. Tailrace decodes up to 256 rollouts at a time, four steps'
worth, which its asynchronous schedule allows (tokens are at most 4 versions old), and generates with bf16 weights.

Learning. A smaller Qwen3, schooled a little to write texts backwards, is trained by both at the same rate, with the
same loss, on the same prompts and reward, for as many trained tokens; then `tailrace eval` measures both on held-out
texts.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import parse_options, progress, report  # isort: skip - before torch

import math
import statistics
import tempfile
from dataclasses import dataclass

from benchmarks.peers import Job, require_peer, run_peer, run_tailrace, tailrace_reward
from benchmarks.shared_tasks import COUNTS, reverse_tasks, speed_tasks, write_rows
from benchmarks.small_model import ModelSize, make_model, make_tokenizer, save, school, set_end_probability

GROUP_SIZE, BATCH_SIZE = 8, 64
END_PROBABILITY = {"fixed": 1e-9, "natural": 0.00206}
"""Of every token; under the second one the mean of lengths cut at 256 is 200."""
CAP = {"fixed": 64, "natural": 256}
STEPS = {"fixed": (24, 6), "natural": (12, 3)}
"""Of Tailrace and of TRL; figures are rates, and Tailrace's include its start from empty slots and its end."""
QUICK_STEPS = {"fixed": (6, 2), "natural": (3, 1)}
TARGETS = {
    ("fixed", "float32"): 1.5,
    ("fixed", "bfloat16"): 2.0,
    ("natural", "float32"): 2.5,
    ("natural", "bfloat16"): 3.0,
}
LEARNING_SEEDS = (0, 1, 2)
LEARNING_STEPS = 30
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class SpeedRow:
    """One workload in one precision."""

    case: str
    precision: str
    tailrace_tokens_per_cpu_s: float
    trl_tokens_per_cpu_s: float
    ratio: float
    wall_ratio: float
    tailrace_mean_tokens: float
    trl_mean_tokens: float
    target: float
    met: bool


@dataclass(frozen=True)
class LearningRow:
    """Held-out reward after as many trained tokens; means and standard errors over seeds."""

    case: str
    precision: str
    seeds: int
    trained_tokens: int
    reward_before: float
    tailrace_reward: float
    tailrace_standard_error: float
    trl_reward: float
    trl_standard_error: float
    target: float
    """TRL's mean less one standard error of the difference."""
    met: bool


def speed(workload: str, precision: str, folder: Path, steps: tuple[int, int]) -> SpeedRow:
    """Run both."""
    model, tasks = folder / f"model-{workload}", folder / "speed.jsonl"
    if not model.exists():
        write_rows(tasks, speed_tasks(4096))
        made = make_model(ModelSize())
        set_end_probability(made, END_PROBABILITY[workload])
        save(model, made, make_tokenizer([" ".join(COUNTS)], ModelSize().vocabulary))
    ours, theirs = (
        Job(
            model=model,
            tasks=tasks,
            reward="length",
            precision=precision,
            steps=count,
            group_size=GROUP_SIZE,
            batch_size=BATCH_SIZE,
            max_tokens_per_completion=CAP[workload],
            learning_rate=1e-7,
        )
        for count in steps
    )
    tailrace = run_tailrace(ours, folder, f"{workload}-{precision}")
    trl = run_peer(theirs, folder, f"{workload}-{precision}")
    target = TARGETS[workload, precision]
    ratio = tailrace.tokens_per_cpu_s / trl.tokens_per_cpu_s
    return SpeedRow(
        case=workload,
        precision=precision,
        tailrace_tokens_per_cpu_s=tailrace.tokens_per_cpu_s,
        trl_tokens_per_cpu_s=trl.tokens_per_cpu_s,
        ratio=ratio,
        wall_ratio=tailrace.tokens_per_s / trl.tokens_per_s,
        tailrace_mean_tokens=tailrace.mean_tokens,
        trl_mean_tokens=trl.mean_tokens,
        target=target,
        met=ratio >= target,
    )


def learning(folder: Path, seeds: tuple[int, ...], steps: int) -> LearningRow:
    """Train with both, seed by seed, and measure both on held-out texts."""
    model, held_out = folder / "model-learning", folder / "held-out.jsonl"
    size = ModelSize(layers=2, hidden=128, heads=2, key_value_heads=2, vocabulary=320)
    lessons = reverse_tasks(4000, seed=1000)
    tokenizer = make_tokenizer([], size.vocabulary)
    schooled = make_model(size)
    school(schooled, tokenizer, lessons)
    save(model, schooled, tokenizer)
    write_rows(held_out, reverse_tasks(400, seed=2000))
    before = tailrace_reward(model, held_out, folder, "before")
    ours, theirs, tokens = [], [], []
    for seed in seeds:
        tasks = folder / f"reverse-{seed}.jsonl"
        write_rows(tasks, reverse_tasks(4096, seed))
        job = Job(
            model=model,
            tasks=tasks,
            reward="reverse",
            precision="float32",
            steps=steps,
            group_size=GROUP_SIZE,
            batch_size=BATCH_SIZE,
            max_tokens_per_completion=32,
            learning_rate=LEARNING_RATE,
            seed=seed,
        )
        tailrace = run_tailrace(job, folder, f"learning-{seed}")
        trl = run_peer(job.until(tailrace.tokens), folder, f"learning-{seed}")
        tokens.append(tailrace.tokens)
        ours.append(tailrace_reward(tailrace.model, held_out, folder, f"tailrace-{seed}"))
        theirs.append(tailrace_reward(trl.model, held_out, folder, f"trl-{seed}"))
        progress(f"learning, seed {seed}: {before:.3f} before, Tailrace {ours[-1]:.3f}, TRL {theirs[-1]:.3f}")
    errors = standard_error(ours), standard_error(theirs)
    least = statistics.mean(theirs) - math.hypot(*errors)
    return LearningRow(
        case="learning",
        precision="float32",
        seeds=len(seeds),
        trained_tokens=round(statistics.mean(tokens)),
        reward_before=before,
        tailrace_reward=statistics.mean(ours),
        tailrace_standard_error=errors[0],
        trl_reward=statistics.mean(theirs),
        trl_standard_error=errors[1],
        target=least,
        met=statistics.mean(ours) >= least,
    )


def standard_error(values: list[float]) -> float:
    """Of the mean; 0 for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def main() -> None:
    options = parse_options(__doc__)
    require_peer()
    names = [f"{workload}-{precision}" for workload, precision in TARGETS] + ["learning"]
    if options.quick and not options.cases:
        names = ["fixed-float32", "fixed-bfloat16"]
    rows: list[SpeedRow | LearningRow] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-vs-trl-") as temporary:
        folder = Path(temporary)
        for name in options.choose(names):
            workload, _, precision = name.partition("-")
            if name == "learning":
                seeds, steps = ((0,), 10) if options.quick else (LEARNING_SEEDS, LEARNING_STEPS)
                rows.append(learning(folder, seeds, steps))
            else:
                steps = (QUICK_STEPS if options.quick else STEPS)[workload]
                row = speed(workload, precision, folder, steps)
                progress(
                    f"{name}: {row.tailrace_tokens_per_cpu_s:,.0f} / {row.trl_tokens_per_cpu_s:,.0f} = {row.ratio:.2f}"
                )
                rows.append(row)
    report("Tailrace and TRL", rows, options)


if __name__ == "__main__":
    main()
