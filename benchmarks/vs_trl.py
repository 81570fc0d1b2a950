"""Tailrace against TRL's GRPOTrainer: the same model, tasks, group size, lengths and precision, one thread per process.

    make bench-trl-env                       # once: TRL in an environment of its own
    python benchmarks/vs_trl.py [--json] [--quick] [--case fixed-float32 ...]

Speed. A Qwen3 of 3.4 million parameters, 8 tasks x 8 rollouts per step, a reward that costs nothing, and a learning
rate so low that lengths stay what they are. `fixed`: 64 tokens each, none ends earlier. `natural`: every token is the
last one with the same probability (see `small_model.py`), mean 200, cut at 256. Figures are trained completion tokens
over user and system CPU of all processes, from the first rollout to the last step, start-up left out on both sides, all
with one thread; `wall_ratio` compares wall time on two cores, where TRL has two threads. TRL runs as
`trl_sweep.py` found it best, its allocator set as Tailrace sets its own, and as it sets itself up (`trl_defaults`),
without a reference model; `ratio` is to the faster of the two, by the median of the repeats. TRL's bf16 is autocast
over float32 weights. Tailrace decodes up to 256 rollouts at a time, four steps' worth, which its asynchronous schedule
allows (tokens are at most 4 versions old), and beside that with one step's slots, 64; it generates with bf16 weights.
One repeat of the four cases by default; recorded figures have three, each with a seed of its own, that of both sides.

Learning (`--case learning`). A smaller Qwen3, schooled a little to write texts backwards, is trained by both at the
same rate, with the same loss, on the same prompts and reward, for as many trained tokens; then `tailrace eval` measures
both on texts that neither the lessons nor the training have, told apart by a hash of the text.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import common_options, common_parser, progress, report  # isort: skip - before torch

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.peers import (
    TRL_DEFAULTS,
    TRL_ON_POLICY,
    TRL_TUNED,
    Job,
    Outcome,
    require_peer,
    run_peer,
    run_tailrace,
    tailrace_reward,
)
from benchmarks.shared_tasks import COUNTS, reverse_tasks, speed_tasks, write_rows
from benchmarks.small_model import ModelSize, make_model, make_tokenizer, save, school, set_end_probability

GROUP_SIZE, BATCH_SIZE = 8, 64
END_PROBABILITY = {"fixed": 1e-9, "natural": 0.00206}
"""Of every token; under the second one the mean of lengths cut at 256 is 200."""
CAP = {"fixed": 64, "natural": 256}
STEPS = (24, 16, 8)
"""Of Tailrace, of Tailrace with one step's slots, and of TRL, which trains on all that it generated; figures are rates,
and Tailrace's include its start from empty slots and its end."""
QUICK_STEPS = (3, 2, 1)
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
    """One workload in one precision: medians over repeats, in tokens per CPU-second."""

    case: str
    precision: str
    repeats: int
    tailrace: float
    tailrace_one_step: float
    """With slots for one step's rollouts, as TRL has."""
    trl: float
    """At its best: as `trl_sweep.py` found it, or by its defaults where those are the faster here."""
    trl_defaults: float
    ratio: float
    """To TRL at its best."""
    ratio_range: str
    ratio_one_step: float
    ratio_defaults: float
    ratio_defaults_range: str
    wall_ratio: float
    """Tokens per second of wall time on two cores: TRL's process has two threads, Tailrace's have one each."""
    wall_ratio_range: str
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
    tailrace_generated_tokens: int
    trl_generated_tokens: int
    reward_before: float
    tailrace_rewards: str
    """Of each seed."""
    trl_rewards: str
    tailrace_reward: float
    tailrace_standard_error: float
    trl_reward: float
    trl_standard_error: float
    target: float
    """TRL's mean less one standard error of the difference."""
    met: bool


def speed_job(workload: str, precision: str, folder: Path, steps: int) -> Job:
    """So many steps; makes the model and the tasks where they are not there yet."""
    model, tasks = folder / f"model-{workload}", folder / "speed.jsonl"
    if not model.exists():
        write_rows(tasks, speed_tasks(4096))
        made = make_model(ModelSize())
        set_end_probability(made, END_PROBABILITY[workload])
        save(model, made, make_tokenizer([" ".join(COUNTS)], ModelSize().vocabulary))
    return Job(
        model=model,
        tasks=tasks,
        reward="length",
        precision=precision,
        steps=steps,
        group_size=GROUP_SIZE,
        batch_size=BATCH_SIZE,
        max_tokens_per_completion=CAP[workload],
        learning_rate=1e-7,
    )


@dataclass(frozen=True)
class Repeat:
    """Every side once, one after another."""

    tailrace: Outcome
    tailrace_one_step: Outcome
    trl: Outcome
    trl_two_threads: Outcome
    trl_defaults: Outcome

    @property
    def wall_ratio(self) -> float:
        return self.tailrace.tokens_per_s / self.trl_two_threads.tokens_per_s


def run_sides(case: str, turn: int, folder: Path, steps: tuple[int, int, int]) -> Repeat:
    """In turns, so that all sides have the machine as it is just then; the turn is the seed of all of them."""
    workload, _, precision = case.partition("-")
    jobs = (replace(speed_job(workload, precision, folder, count), seed=turn) for count in steps)
    (ours, one_step, theirs), tuned, name = jobs, TRL_TUNED[case], f"{case}-{turn}"
    return Repeat(
        tailrace=run_tailrace(ours, folder, name),
        tailrace_one_step=run_tailrace(one_step, folder, f"{name}-one-step", slots=BATCH_SIZE),
        trl=run_peer(theirs, folder, name, tuned),
        trl_two_threads=run_peer(theirs, folder, f"{name}-two-threads", replace(tuned, threads=2)),
        trl_defaults=run_peer(theirs, folder, f"{name}-defaults", TRL_DEFAULTS),
    )


def told(name: str, turn: int, done: Repeat) -> str:
    """A line for whoever waits."""
    means = f"{done.tailrace.mean_tokens:.1f} and {done.trl.mean_tokens:.1f} tokens"
    ratio = done.tailrace.tokens_per_cpu_s / done.trl.tokens_per_cpu_s
    return f"{name}, seed {turn}: {ratio:.2f}, completions of {means} in the mean"


def speed_row(name: str, repeats: list[Repeat]) -> SpeedRow:
    """Medians, and ranges of ratios."""
    workload, precision = name.split("-")

    def middle(rate: Callable[[Repeat], float]) -> float:
        return statistics.median(map(rate, repeats))

    def extent(rate: Callable[[Repeat], float]) -> str:
        rates = [rate(repeat) for repeat in repeats]
        return f"{min(rates):.2f} to {max(rates):.2f}"

    def best(one: Repeat) -> float:
        return (one.trl_defaults if has_best_defaults else one.trl).tokens_per_cpu_s

    def ratio(one: Repeat) -> float:
        return one.tailrace.tokens_per_cpu_s / best(one)

    def ratio_defaults(one: Repeat) -> float:
        return one.tailrace.tokens_per_cpu_s / one.trl_defaults.tokens_per_cpu_s

    defaults, target = middle(lambda one: one.trl_defaults.tokens_per_cpu_s), TARGETS[workload, precision]
    has_best_defaults = defaults > middle(lambda one: one.trl.tokens_per_cpu_s)
    return SpeedRow(
        case=workload,
        precision=precision,
        repeats=len(repeats),
        tailrace=middle(lambda one: one.tailrace.tokens_per_cpu_s),
        tailrace_one_step=middle(lambda one: one.tailrace_one_step.tokens_per_cpu_s),
        trl=middle(best),
        trl_defaults=defaults,
        ratio=middle(ratio),
        ratio_range=extent(ratio),
        ratio_one_step=middle(lambda one: one.tailrace_one_step.tokens_per_cpu_s / best(one)),
        ratio_defaults=middle(ratio_defaults),
        ratio_defaults_range=extent(ratio_defaults),
        wall_ratio=middle(lambda one: one.wall_ratio),
        wall_ratio_range=extent(lambda one: one.wall_ratio),
        tailrace_mean_tokens=middle(lambda one: one.tailrace.mean_tokens),
        trl_mean_tokens=middle(lambda one: one.trl.mean_tokens),
        target=target,
        met=middle(ratio) >= target,
    )


def learning(folder: Path, seeds: tuple[int, ...], steps: int) -> LearningRow:
    """Train with both, seed by seed, and measure both on held-out texts."""
    model, held_out = folder / "model-learning", folder / "held-out.jsonl"
    size = ModelSize(layers=2, hidden=128, heads=2, key_value_heads=2, vocabulary=320)
    lessons = reverse_tasks(4000, seed=1000, held_out=False)
    tokenizer = make_tokenizer([], size.vocabulary)
    schooled = make_model(size)
    school(schooled, tokenizer, lessons)
    save(model, schooled, tokenizer)
    write_rows(held_out, reverse_tasks(400, seed=2000, held_out=True))
    before = tailrace_reward(model, held_out, folder, "before")
    ours, theirs, runs = [], [], list[tuple[Outcome, Outcome]]()
    for seed in seeds:
        tasks = folder / f"reverse-{seed}.jsonl"
        write_rows(tasks, reverse_tasks(4096, seed, held_out=False))
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
        trl = run_peer(job.until(tailrace.tokens), folder, f"learning-{seed}", TRL_ON_POLICY)
        runs.append((tailrace, trl))
        ours.append(tailrace_reward(tailrace.model, held_out, folder, f"tailrace-{seed}"))
        theirs.append(tailrace_reward(trl.model, held_out, folder, f"trl-{seed}"))
        progress(f"learning, seed {seed}: {before:.3f} before, Tailrace {ours[-1]:.3f}, TRL {theirs[-1]:.3f}")
    errors = standard_error(ours), standard_error(theirs)
    least = statistics.mean(theirs) - math.hypot(*errors)
    return LearningRow(
        case="learning",
        precision="float32",
        seeds=len(seeds),
        trained_tokens=round(statistics.mean(tailrace.tokens for tailrace, _ in runs)),
        tailrace_generated_tokens=round(statistics.mean(tailrace.generated_tokens for tailrace, _ in runs)),
        trl_generated_tokens=round(statistics.mean(trl.generated_tokens for _, trl in runs)),
        reward_before=before,
        tailrace_rewards=", ".join(f"{reward:.4f}" for reward in ours),
        trl_rewards=", ".join(f"{reward:.4f}" for reward in theirs),
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
    parser = common_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="of every case and side, in turns")
    arguments = parser.parse_args()
    options = common_options(arguments)
    require_peer()
    names = [f"{workload}-{precision}" for workload, precision in TARGETS]
    chosen = options.choose([*names, "learning"])
    if not options.cases:
        chosen = ["fixed-float32"] if options.quick else names
    rows: list[SpeedRow | LearningRow] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-vs-trl-") as temporary:
        folder = Path(temporary)
        repeats: dict[str, list[Repeat]] = {name: [] for name in chosen if name != "learning"}
        for turn in range(arguments.repeats):
            for name, done in repeats.items():
                done.append(run_sides(name, turn, folder, QUICK_STEPS if options.quick else STEPS))
                progress(told(name, turn, done[-1]))
        rows += [speed_row(name, done) for name, done in repeats.items()]
        if "learning" in chosen:
            seeds, learning_steps = ((0,), 10) if options.quick else (LEARNING_SEEDS, LEARNING_STEPS)
            rows.append(learning(folder, seeds, learning_steps))
    report("Tailrace and TRL", rows, options)


if __name__ == "__main__":
    main()
