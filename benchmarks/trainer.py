"""The trainer's step by itself: against the machine's rate of matrix products, and against TRL's on the same tokens.

    make bench-trl-env                # once: TRL in an environment of its own
    python benchmarks/trainer.py [--json] [--quick] [--case small-float32-natural ...] [--sweep]

    small      the Qwen3 of 3.4 million parameters;                smollm2   a Llama of SmolLM2-135M's shape
    natural    completions of 200 tokens on average, 256 at most;  long      drawn from a mean of 2,000, 8,192 at most
    logits     what the head holds of logits, from rows of 1k to 16k tokens, at vocabularies of 1k and 152k
    ranks      two gloo ranks on a core each against one rank on one core, in wall time

Optimizer steps over random tokens: forward, loss, backward, clip, AdamW. Figures are the trained completion tokens of
all measured steps over their CPU time, one thread. `mfu` is the CPU time of steps that only multiplied (the model's own
matrices, each by the faster of two libraries, and attention at the same rate) over that of the steps. TRL pads all
completions of an optimizer step to the longest of them, whatever the per-device batch: they are one generation. `long`
loads are few draws, whose mean and longest stand in their row. `--sweep` tries TRL's settings instead: per-device
batches, then eager attention and glibc's own allocator at the best of them; the best three run twice more, in turns,
and the best median is marked. What it came to stands in `TRL_TUNED`. --quick leaves out ranks, and bfloat16, which a
processor without instructions for it computes for minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import Options, common_options, common_parser, progress, report  # isort: skip - before torch

import itertools
import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from benchmarks.logits_memory import logits_rows
from benchmarks.peers import ALLOCATOR_VARIABLES, PEER_PYTHON, Tuning, environment, require_peer
from benchmarks.small_model import ModelSize, make_model, make_smollm2, make_tokenizer, save

from tailrace.cpu.memory import huge_pages

MODELS = ("small", "smollm2")
PRECISIONS = ("float32", "bfloat16")
PROMPT_TOKENS = 32
TARGET_MFU = {"float32": 0.75, "bfloat16": 0.72}
TARGET_RATIO = {"float32": 2.5, "bfloat16": 3.0}
TARGET_RANKS = 1.8
FINALISTS, FINAL_TURNS = 3, 2


@dataclass(frozen=True)
class Load:
    """What one step trains on."""

    groups: int
    group_size: int
    cap: int
    steps: int
    """That are measured."""

    @property
    def is_long(self) -> bool:
        return self.cap > 256


LOADS = {
    ("small", "natural"): Load(8, 8, 256, steps=3),
    ("small", "long"): Load(2, 8, 8192, steps=1),
    ("smollm2", "natural"): Load(2, 8, 256, steps=1),
    ("smollm2", "long"): Load(1, 4, 8192, steps=1),
}
WARM_UP = Load(1, 4, 64, steps=1)

_KEEPS = Tuning(has_our_allocator=True)
TRL_TUNED = {
    "small-float32-natural": replace(_KEEPS, micro_batch=16),
    "small-bfloat16-natural": replace(_KEEPS, micro_batch=16, attention="eager"),
    "small-float32-long": replace(_KEEPS, micro_batch=1),
    "small-bfloat16-long": replace(_KEEPS, micro_batch=1),
    "smollm2-float32-natural": replace(_KEEPS, micro_batch=2),
    "smollm2-bfloat16-natural": replace(_KEEPS, micro_batch=4, attention="eager"),
    "smollm2-float32-long": replace(_KEEPS, micro_batch=1),
    "smollm2-bfloat16-long": replace(_KEEPS, micro_batch=1),
}
"""The best of `--sweep` for natural lengths. Long rows were not swept: they get a batch of one, of which each sample is
still as long as the longest of its step."""


@dataclass(frozen=True)
class StepRow:
    """One model, precision and load."""

    case: str
    model: str
    precision: str
    tokens: int
    """Trained completion tokens of all measured steps."""
    mean_tokens: float
    """Of a completion."""
    longest_tokens: int
    """Completion."""
    trl_padded_tokens: int
    """What TRL computes for `tokens`: each step's rollouts times the longest of the step."""
    tokens_per_cpu_s: float
    mfu: float
    target_mfu: float
    trl_tokens_per_cpu_s: float
    ratio: float
    target: float
    """Of the ratio."""
    met: bool


@dataclass(frozen=True)
class RanksRow:
    """Two ranks against one."""

    case: str
    model: str
    precision: str
    one_rank_tokens_per_s: float
    two_ranks_tokens_per_s: float
    speedup: float
    two_alone_speedup: float
    """Of two single ranks side by side that share nothing: what the machine itself allows."""
    target: float
    met: bool


@dataclass(frozen=True)
class SweepRow:
    """One setting of TRL."""

    case: str
    micro_batch: int
    attention: str
    our_allocator: bool
    runs: int
    """That were measured."""
    trl_tokens_per_cpu_s: float | None
    """By the median run; None where TRL could not run it."""
    best: bool


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="try TRL's settings instead")
    arguments = parser.parse_args()
    options = common_options(arguments)
    names = [f"{model}-{precision}-{load}" for model, load in LOADS for precision in PRECISIONS]
    chosen = options.choose([*names, *(f"ranks-{model}" for model in MODELS), "logits"])
    if options.quick and not options.cases:
        chosen = ["small-float32-natural", "logits"]
    with tempfile.TemporaryDirectory(prefix="tailrace-trainer-") as folder:
        bench = Bench(Path(folder), options, arguments.sweep)
        rows = [row for name in chosen for row in case_rows(name, bench)]
    report("The trainer's step, one thread; TRL's on the same tokens, padded as it pads", rows, options)


def case_rows(name: str, bench: Bench) -> Sequence[Any]:
    progress(name)
    if name == "logits":
        return logits_rows(quick=bench.options.quick)
    if name.startswith("ranks-"):
        precisions = PRECISIONS[:1] if bench.options.quick else PRECISIONS
        return [bench.ranks(name.removeprefix("ranks-"), precision) for precision in precisions]
    return bench.sweep(name) if bench.sweeps else [bench.step(name)]


class Bench:
    """Runs workers in a folder."""

    def __init__(self, folder: Path, options: Options, sweeps: bool) -> None:
        self.folder, self.options, self.sweeps = folder, options, sweeps
        self._numbers = itertools.count()

    def step(self, case: str) -> StepRow:
        require_peer()
        model, precision, _ = case.split("-")
        job = self.job(case)
        steps = measured_lengths(job)
        lengths = [length for step in steps for length in step]
        ours = self.ours(job)
        cpu_s, tokens = sum(ours["cpu_s"]), sum(ours["tokens"])
        trl_s = sum(self.trl(job, TRL_TUNED[case]))
        mfu, ratio = ours["floor_s"] / cpu_s, trl_s / cpu_s
        return StepRow(
            case=case,
            model=model,
            precision=precision,
            tokens=tokens,
            mean_tokens=statistics.mean(lengths),
            longest_tokens=max(lengths),
            trl_padded_tokens=sum(len(step) * max(step) for step in steps),
            tokens_per_cpu_s=tokens / cpu_s,
            mfu=mfu,
            target_mfu=TARGET_MFU[precision],
            trl_tokens_per_cpu_s=tokens / trl_s,
            ratio=ratio,
            target=TARGET_RATIO[precision],
            met=mfu >= TARGET_MFU[precision] and ratio >= TARGET_RATIO[precision],
        )

    def sweep(self, case: str) -> list[SweepRow]:
        """Of one case, in the order that they were tried in."""
        require_peer()
        job = self.job(case)
        steps = measured_lengths(job)
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if len(steps[0]) % size == 0]
        if self.is_long(case):
            sizes = [size for size in sizes if size <= 4]
        found: dict[Tuning, list[float]] = {}
        for size in sizes:
            self.try_out(job, replace(_KEEPS, micro_batch=size), found)
        best = min(found, key=lambda one: typical_s(found[one]))
        self.try_out(job, replace(best, has_our_allocator=False), found)
        if not self.is_long(case):  # eager attention holds whole squares
            self.try_out(job, replace(best, attention="eager"), found)
        finalists = sorted(found, key=lambda one: typical_s(found[one]))[:FINALISTS]
        for tuning in finalists * FINAL_TURNS:
            self.try_out(job, tuning, found)
        best = min(finalists, key=lambda one: typical_s(found[one]))
        tokens = sum(map(sum, steps))
        return [sweep_row(case, one, times, tokens, one == best) for one, times in found.items()]

    def try_out(self, job: dict[str, Any], tuning: Tuning, found: dict[Tuning, list[float]]) -> None:
        """Add the CPU seconds of one more run of a setting; none where TRL cannot run it."""
        times = found.setdefault(tuning, [])
        try:
            times.append(sum(self.trl(job, tuning)))
        except SystemExit as failure:
            progress(str(failure)[-600:])
        progress(f"{times} with {tuning}")

    def ranks(self, model: str, precision: str) -> RanksRow:
        """The same batches, with one rank and with two, in turns."""
        job = self.job(f"{model}-{precision}-natural") | {"floor": False}
        alone, joint = job | {"ranks": 1}, job | {"ranks": 2}
        speeds: tuple[list[float], list[float], list[float]] = [], [], []
        for _ in range(1 if self.options.quick else 3):
            for figures, found in zip(
                (self.pinned([alone]), self.pinned([joint]), self.pinned([alone, alone])), speeds, strict=True
            ):
                found.append(sum(sum(one["tokens"]) / one["wall_s"] for one in figures))
        one, two, apart = (statistics.median(found) for found in speeds)
        case, met = f"ranks-{model}-{precision}", two / one >= TARGET_RANKS
        return RanksRow(case, model, precision, one, two, two / one, apart / one, TARGET_RANKS, met)

    @staticmethod
    def is_long(case: str) -> bool:
        return case.endswith("-long")

    def job(self, case: str) -> dict[str, Any]:
        """Batches and the model's folder."""
        model, precision, lengths = case.split("-")
        load = LOADS[model, lengths]
        steps = 1 if self.options.quick else load.steps
        model_folder, vocabulary = self.model(model)
        random = np.random.default_rng(0)
        batches = [make_batch(one, vocabulary, random) for one in [warm_up(load), *[load] * steps]]
        return {"model": str(model_folder), "precision": precision, "batches": batches, "ranks": 1, "floor": True}

    def model(self, name: str) -> tuple[Path, int]:
        """Its folder and vocabulary."""
        folder = self.folder / name
        size = ModelSize()
        made = make_model(size) if name == "small" else make_smollm2()
        if not folder.exists():
            made.config.max_position_embeddings = 2 * LOADS[name, "long"].cap
            save(folder, made, make_tokenizer(["a b c"], size.vocabulary))
        return folder, made.config.vocab_size

    def ours(self, job: dict[str, Any]) -> dict[str, Any]:
        """Figures of Tailrace on one rank, which may use both cores."""
        path, figures = self.write(job)
        run_all([worker(path)], tuned_environment())
        return json.loads(figures.read_text())

    def pinned(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Figures of jobs side by side, each rank on a core of its own."""
        written = [self.write(job) for job in jobs]
        paths = [path for job, (path, _) in zip(jobs, written, strict=True) for _ in range(job["ranks"])]
        run_all([worker(path, core) for core, path in enumerate(paths)], tuned_environment())
        return [json.loads(figures.read_text()) for _, figures in written]

    def trl(self, job: dict[str, Any], tuning: Tuning) -> list[float]:
        """CPU seconds of TRL's steps."""
        fitting = next(size for size in (tuning.micro_batch, 4, 2, 1) if divides(size, job["batches"]))
        tuned = {"micro_batch": fitting, "attention": tuning.attention}
        path, figures = self.write(job | {"tuning": tuned})
        variables = environment() | (ALLOCATOR_VARIABLES if tuning.has_our_allocator else {})
        run_all([[str(PEER_PYTHON), str(Path(__file__).with_name("trl_step.py")), str(path)]], variables)
        return json.loads(figures.read_text())["cpu_s"]

    def write(self, job: dict[str, Any]) -> tuple[Path, Path]:
        """Where a worker reads it, and where its figures come."""
        folder = self.folder / f"job-{next(self._numbers)}"
        folder.mkdir()
        paths = {"figures": str(folder / "figures.json"), "store": str(folder / "store"), "folder": str(folder / "out")}
        (folder / "job.json").write_text(json.dumps(job | paths))
        return folder / "job.json", folder / "figures.json"


def typical_s(times: list[float]) -> float:
    """Seconds of a run; endless where there is none."""
    return statistics.median(times) if times else math.inf


def sweep_row(case: str, tuning: Tuning, times: list[float], tokens: int, best: bool) -> SweepRow:
    """`tokens` are those of a run."""
    rate = tokens / typical_s(times) if times else None
    return SweepRow(case, tuning.micro_batch, tuning.attention, tuning.has_our_allocator, len(times), rate, best=best)


def worker(job: Path, *rank: int) -> list[str]:
    """The command of one process."""
    return [sys.executable, str(Path(__file__).with_name("trainer_step.py")), str(job), *map(str, rank)]


def tuned_environment() -> dict[str, str]:
    """As `tailrace train` starts its trainer."""
    variables = environment()
    return variables | huge_pages(variables)


def run_all(commands: list[list[str]], variables: dict[str, str]) -> None:
    """All at once; exits with the end of what one wrote that failed."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    for process, command in zip(processes, commands, strict=True):
        output, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed with status {process.returncode}:\n{output[-4000:]}")


def measured_lengths(job: dict[str, Any]) -> list[list[int]]:
    """Of the completions, step by step; the first batch is for warming up."""
    return [[len(one) for group in batch for one in group["completions"]] for batch in job["batches"][1:]]


def warm_up(load: Load) -> Load:
    """As many rollouts, since TRL's batches are all of one size; short where steps are long."""
    return replace(load, cap=min(load.cap, WARM_UP.cap if load.steps == 1 else load.cap))


def divides(size: int, batches: list[list[dict[str, Any]]]) -> bool:
    return sum(len(group["completions"]) for group in batches[0]) % size == 0


def make_batch(load: Load, vocabulary: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Groups of one prompt each."""
    groups = []
    for _ in range(load.groups):
        lengths = draw_lengths(load, random)
        groups.append(
            {
                "prompt": random.integers(3, vocabulary, PROMPT_TOKENS).tolist(),
                "completions": [random.integers(3, vocabulary, length).tolist() for length in lengths],
            }
        )
    return groups


def draw_lengths(load: Load, random: np.random.Generator) -> list[int]:
    """[group_size]: lognormal where they are long, else geometric with the cap's share of the natural ones."""
    if load.is_long:
        drawn = random.lognormal(np.log(2000) - 0.5, 1.0, load.group_size)
    else:
        drawn = random.geometric(0.00206 * 256 / load.cap, load.group_size)
    return np.clip(drawn, 16, load.cap).astype(int).tolist()


if __name__ == "__main__":
    main()
