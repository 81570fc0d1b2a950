"""Whether a simulation tells what a run does: real runs of the quickstart's model, and the same runs simulated.

    python benchmarks/simulation_vs_run.py [--json] [--quick] [--case stream ...] [--runs DIR]

Real: `tailrace train` with the bundled model on the torch engine, two generators, a trainer and an orchestrator, each a
process. Replies are as long as they are drawn: the agent asks for so many tokens, and the copy of the model that is
trained names an end token that it does not have. Rewards are drawn, too, so that every group is trained on; learning
rate 1e-6. Simulated: the scheduler, rollouter, router, batching and ledger of a run in virtual time, with the same
names of tasks and rollouts, so with the same lengths and rewards; engines, trainer and the weights' way are arithmetic.

That arithmetic has five numbers. An engine's step by what runs on it: least squares over completions, of the time per
token on the mean number of running requests. An optimizer step by its tokens: least squares over steps; on top the mean
time until the trainer asks for more. The mean time until each engine goes on with new weights. Two generators and a
trainer share two cores, so each number holds the wait for a core, as it was on average. They are read from the trace
and the trainer's metrics of the run `itself`, or are the means of `the others`, the other seeds' runs: that is a
forecast, and holds as far as the machine is equally fast in all of them.

`utilization`: slots taken over slots. `masked`: stale tokens, those of rollouts masked entirely included, over the
tokens of rollouts that ended. Staleness is of tokens that bear loss. All from the end of step 8 on, until nothing more
is started because the last steps are filled. Means over the seeds with standard deviations, and the ratio of each run;
target: the means' ratio 0.9 to 1.1. Each run is simulated eight times, with optimizer steps that differ by up to 0.7
%, and the mean is taken: which batch takes a group hangs on a millisecond, and what comes after hangs on that.

`--quick`: one short run, fitted to itself. `--runs` keeps the runs' folders, and reads those that are there already.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kit  # isort: skip  - before NumPy: pins threads

import asyncio
import json
import logging
import math
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from benchmarks.drawn_lengths import TASKS
from benchmarks.peers import TAILRACE, environment
from benchmarks.run_times import FloatArray, RunTimes, read_times

from tailrace.config.sources import recipe_folder
from tailrace.generation.router.settings import RouterSettings
from tailrace.reporting.sinks import read_rollouts
from tailrace.simulation import Simulation, SimulationPlan, run_in_virtual_time

T = TypeVar("T", "Figures", "Model")

SEEDS = (0, 1, 2)
WARMUP_STEPS, MEASURED_STEPS, LAST_STEPS = 8, 44, 6
QUICK_MEASURED_STEPS = 4
REPLICAS, SLOTS, GROUP_SIZE, BATCH_SIZE, ROW_TOKENS = 2, 32, 8, 64, 4096
CONTEXT_TOKENS, PROMPT_TOKENS = 1024, 15
LENGTHS = {"mean_log": 4.1, "sigma": 1.2, "task_sigma": 0.7, "cap": 960}
CASES: dict[str, str] = {"stream": "stream", "one-step-off": "one-step-off"}
"""Schedules."""
NO_TOKEN = 640
"""One more than the last of the bundled model."""
LEAST, MOST = 0.9, 1.1
STEP_LENGTHS = (0.9965, 0.9975, 0.9985, 0.9995, 1.0005, 1.0015, 1.0025, 1.0035)
"""Each run is simulated so often, with optimizer steps so many times as long."""
LOOK_S = 0.01
"""Virtual time between two looks at the slots of a simulated run."""


@dataclass(frozen=True)
class Figures:
    """Of one run, real or simulated."""

    utilization: float
    groups_per_s: float
    loss_tokens_per_s: float
    masked: float
    staleness_mean: float
    staleness_max: float


@dataclass(frozen=True)
class Model:
    """What a simulation needs to know of the hardware, as fitted."""

    step_base_s: float
    step_per_running_s: float
    train_s: float
    train_s_per_token: float
    load_s: float


@dataclass(frozen=True)
class Row:
    """One figure of one case."""

    case: str
    fitted_to: str
    figure: str
    runs: int
    real: float
    real_deviation: float
    simulated: float
    simulated_deviation: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    target: str | None
    met: bool | None


@dataclass(frozen=True)
class FitRow:
    """One number of the model: mean and standard deviation over the runs."""

    case: str
    fitted: str
    value: float
    deviation: float


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    rows: list[Row | FitRow] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-simulation-") as temporary:
        folder = Path(temporary) if arguments.runs is None else arguments.runs.resolve()
        model = copy_model(folder / "model")
        for case in options.choose(list(CASES))[: 1 if options.quick else None]:
            rows += compared(case, folder, model, quick=options.quick)
    kit.report("Simulated against real", sorted(rows, key=lambda row: isinstance(row, FitRow)), options)


def compared(case: str, folder: Path, model: Path, *, quick: bool) -> list[Row | FitRow]:
    """Real runs of every seed, then the simulations of them."""
    seeds = SEEDS[:1] if quick else SEEDS
    measured_steps = QUICK_MEASURED_STEPS if quick else MEASURED_STEPS
    runs = [trained(case, seed, folder, model, measured_steps) for seed in seeds]
    models = [fitted(run, measured_steps) for run in runs]
    real = [real_figures(run, measured_steps) for run in runs]
    fits = {"itself": models}
    if len(runs) > 1:
        fits["the others"] = [mean_of(Model, [*models[:one], *models[one + 1 :]]) for one in range(len(models))]
    rows: list[Row | FitRow] = []
    for fitted_to, chosen in fits.items():
        simulated = [simulated_figures(case, *which, measured_steps) for which in zip(seeds, chosen, strict=True)]
        for seed, *both in zip(seeds, real, simulated, strict=True):
            kit.progress(f"{case}, seed {seed}: {told(*both)}")
        rows += [row(case, fitted_to, field.name, real, simulated) for field in fields(Figures)]
    return rows + [FitRow(case, field.name, *mean_and_deviation(models, field.name)) for field in fields(Model)]


# --- real ------------------------------------------------------------------------------------------------------------


def copy_model(folder: Path) -> Path:
    """The bundled model, but that no token ends a reply: the one that is said to is not in its vocabulary."""
    shutil.copytree(recipe_folder() / "models" / "quickstart", folder, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        write_json(folder / name, read_json(folder / name) | {"eos_token_id": NO_TOKEN})
    settings = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {key: settings[key] for key in settings if key != "eos_token"})
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", ""))
    return folder


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def trained(case: str, seed: int, folder: Path, model: Path, measured_steps: int) -> RunTimes:
    """Run it, unless it is there."""
    name = f"{case}-{seed}"
    run = folder / "runs" / name
    if not (run / "summary.json").exists():
        steps = WARMUP_STEPS + measured_steps + LAST_STEPS
        kit.progress(f"{case}, seed {seed}: {steps} steps ...")
        command = [str(TAILRACE), "train", "quickstart", "--name", name, "--seed", str(seed), "--schedule", CASES[case]]
        command += settings(seed, model, steps)
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"tailrace train failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return read_times(run)


def settings(seed: int, model: Path, steps: int) -> list[str]:
    """Of a real run, as on the command line."""
    given = {
        "max_steps": steps,
        "model.name": model,
        "environment.name": "benchmarks.drawn_lengths:drawn",
        "environment.args.seed": seed,
        **{f"environment.args.{name}": value for name, value in LENGTHS.items()},
        "rollouts.group_size": GROUP_SIZE,
        "rollouts.max_tokens": LENGTHS["cap"],
        "rollouts.max_turns": 1,
        "scheduling.batch_size": BATCH_SIZE,
        "scheduling.row_tokens": ROW_TOKENS,
        "generator.replicas": REPLICAS,
        "generator.slots": SLOTS,
        "trainer.learning_rate": 1e-6,
        "observability.live": "off",
        "observability.report": "false",
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def window(run: RunTimes, measured_steps: int) -> tuple[float, float]:
    """From the end of the warm-up's last step to that of the last measured one."""
    return float(run.trained_s[WARMUP_STEPS - 1, 1]), float(run.trained_s[WARMUP_STEPS + measured_steps - 1, 1])


def measured_lines(run: RunTimes, measured_steps: int) -> list[dict[str, Any]]:
    lines = run.metrics[WARMUP_STEPS : WARMUP_STEPS + measured_steps]
    if any(line.get("scheduler/enough_wait_s") for line in lines):
        sys.exit(f"{run.folder}: nothing more was started before the last measured step had ended; raise LAST_STEPS")
    return lines


def real_figures(run: RunTimes, measured_steps: int) -> Figures:
    begin_s, end_s = window(run, measured_steps)
    lines = measured_lines(run, measured_steps)
    steps = {line["step"] for line in lines}
    ended = [rollout for rollout in read_rollouts(run.folder / "rollouts") if rollout.step in steps]
    stale = sum(rollout.completion_tokens for rollout in ended if rollout.outcome.reason == "stale")
    tokens = sum(line["batch/loss_tokens"] for line in lines)
    return Figures(
        utilization=run.slots_used(begin_s, end_s) / (REPLICAS * SLOTS),
        groups_per_s=measured_steps * BATCH_SIZE / GROUP_SIZE / (end_s - begin_s),
        loss_tokens_per_s=tokens / (end_s - begin_s),
        masked=(stale + sum(line["batch/masked_tokens"] for line in lines))
        / sum(rollout.completion_tokens for rollout in ended),
        staleness_mean=sum(line["staleness/mean"] * line["batch/loss_tokens"] for line in lines) / tokens,
        staleness_max=max(line["staleness/max"] for line in lines),
    )


# --- the model -------------------------------------------------------------------------------------------------------


def fitted(run: RunTimes, measured_steps: int) -> Model:
    """From the steps of engines and trainer in the measured time."""
    step_s, running, sampled = run.steps_of_engines(*window(run, measured_steps))
    step_base_s, step_per_running_s = line_through(running, step_s, sampled)
    steps = slice(WARMUP_STEPS, WARMUP_STEPS + measured_steps)
    tokens = np.array([line["batch/tokens"] for line in run.metrics[steps]])
    took_s = run.trained_s[steps, 1] - run.trained_s[steps, 0]
    train_s, train_s_per_token = line_through(tokens, took_s, np.ones(len(tokens)))
    between_s = run.between_steps_s  # part of a modelled step, which ends where the next one may begin
    loads_s = max(0.0, run.install_s - between_s)
    return Model(
        step_base_s,
        step_per_running_s,
        train_s + between_s,
        train_s_per_token,
        loads_s * 2 / (REPLICAS + 1),  # one replica after the other
    )


def line_through(x: FloatArray, y: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Intercept and slope of the weighted least squares; neither is below 0."""
    scale = np.sqrt(weights)
    intercept, slope = np.linalg.lstsq(np.stack([scale, x * scale], axis=1), y * scale, rcond=None)[0]
    if slope < 0:
        return float(np.average(y, weights=weights)), 0.0
    if intercept < 0:
        return 0.0, float((weights * x * y).sum() / (weights * x * x).sum())
    return float(intercept), float(slope)


# --- simulated -------------------------------------------------------------------------------------------------------


def plan(case: str, seed: int, model: Model, measured_steps: int) -> SimulationPlan:
    """The same run, on modelled hardware. Reading a prompt is part of the steps that were fitted."""
    return SimulationPlan.model_validate(
        {
            "name": case,
            "seed": seed,
            "steps": WARMUP_STEPS + measured_steps,
            "warmup_steps": WARMUP_STEPS,
            "schedule": CASES[case],
            "engines": {
                "replicas": REPLICAS,
                "slots": SLOTS,
                "step_base_s": max(model.step_base_s, 1e-6),
                "step_per_running_s": model.step_per_running_s,
                "prefill_s_per_token": 0.0,
                "kv_capacity_tokens": SLOTS * CONTEXT_TOKENS,
                "router": RouterSettings().model_dump(),  # as in a run
            },
            "trainer": {
                "train_s": model.train_s,
                "train_s_per_token": model.train_s_per_token,
                "sync_s": model.load_s,
                "sync_holds_engines": False,
                "sync_holds_trainer": False,
            },
            "load": {
                "group_size": GROUP_SIZE,
                "prompt_tokens": PROMPT_TOKENS,
                "max_tokens": LENGTHS["cap"],
                "lengths": LENGTHS,
            },
            "scheduling": {"batch_size": BATCH_SIZE, "row_tokens": ROW_TOKENS},
        }
    )


def simulated_figures(case: str, seed: int, model: Model, measured_steps: int) -> Figures:
    """Means over simulations whose optimizer steps hardly differ."""
    simulated = [
        run_in_virtual_time(_simulated(plan(case, seed, with_steps(model, times), measured_steps)))
        for times in STEP_LENGTHS
    ]
    return mean_of(Figures, simulated)


async def _simulated(plan: SimulationPlan) -> Figures:
    simulation = Simulation(plan, tasks=TASKS, watch=False)
    looks: list[tuple[float, int]] = []
    looking = asyncio.create_task(_look(simulation, looks))
    run = await simulation.run()
    looking.cancel()
    begin_s = run.duration_s - run.measured.time_s
    running = [number for time_s, number in looks if time_s >= begin_s]
    return Figures(
        utilization=statistics.fmean(running) / (REPLICAS * SLOTS),
        groups_per_s=run.groups_per_s,
        loss_tokens_per_s=run.loss_tokens_per_s,
        masked=run.masked_share,
        staleness_mean=run.staleness_mean,
        staleness_max=float(run.staleness_max),
    )


async def _look(simulation: Simulation, looks: list[tuple[float, int]]) -> None:
    """At the slots that are taken, until cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        looks.append((clock(), simulation.fleet.running))
        await asyncio.sleep(LOOK_S)


# --- rows ------------------------------------------------------------------------------------------------------------


def row(case: str, fitted_to: str, figure: str, real: Sequence[Figures], simulated: Sequence[Figures]) -> Row:
    real_mean, real_deviation = mean_and_deviation(real, figure)
    simulated_mean, simulated_deviation = mean_and_deviation(simulated, figure)
    ratios = [ratio(getattr(one, figure), getattr(other, figure)) for one, other in zip(simulated, real, strict=True)]
    own = ratio(simulated_mean, real_mean)
    return Row(
        case=case,
        fitted_to=fitted_to,
        figure=figure,
        runs=len(real),
        real=real_mean,
        real_deviation=real_deviation,
        simulated=simulated_mean,
        simulated_deviation=simulated_deviation,
        ratio=own,
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        target=f"ratio {LEAST} to {MOST}" if len(real) > 1 else None,
        met=LEAST <= own <= MOST if len(real) > 1 else None,
    )


def mean_of(kind: type[T], of: Sequence[T]) -> T:
    return kind(**{field.name: mean_and_deviation(of, field.name)[0] for field in fields(kind)})


def with_steps(model: Model, times: float) -> Model:
    """The same, with optimizer steps so many times as long."""
    return replace(model, train_s=times * model.train_s, train_s_per_token=times * model.train_s_per_token)


def ratio(simulated: float, real: float) -> float:
    return simulated / real if real else math.nan


def mean_and_deviation(of: Sequence[object], name: str) -> tuple[float, float]:
    values = [float(getattr(one, name)) for one in of]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def told(real: Figures, simulated: Figures) -> str:
    """Each figure, real and simulated."""
    names = [field.name for field in fields(Figures)]
    return ", ".join(f"{name} {getattr(real, name):.3g} {getattr(simulated, name):.3g}" for name in names)


if __name__ == "__main__":
    logging.disable()
    main()
