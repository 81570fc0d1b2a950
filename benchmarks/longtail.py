"""What the long tail costs under each policy, in simulation: the real scheduler over modelled engines and trainer.

    python benchmarks/longtail.py [--json] [--quick] [--case main] [--case medium] [--case short] [--case runaways]
    python benchmarks/longtail.py --seeds 1 --case medium
    python benchmarks/longtail.py --sweep [--case short] [--policy over-resume]

8 replicas of 64 slots, a step of 15 ms + 0.3 ms per running request, 20 us to read a token again; batches of 64 groups
of 8; training takes 30 s and bringing the weights to the engines 2 s, in which both stand still; 80 steps, the first 20
of which are warm-up; three seeds. Lengths are lognormal, cut off at 16,384 tokens; a part of their deviation is shared
by a task's rollouts. `main` alone by default. `runaways` is generation only: nothing is trained, weights come at once.

`speedup_vs_sync` and `bound_ratio` count trained groups per second, the latter over the lesser of what the engines and
what the trainer can do; `loss_speedup` counts tokens that bear loss. Shares are of the tokens of rollouts that ended:
`masked` are stale ones, rollouts masked entirely included; `wasted` are those of rollouts that were never trained on,
the ones masked entirely (`wholly_stale`) included. `length_ratio` is the mean full length of trained rollouts over that
of all that were begun. `vs_best` is groups per second over that of the fastest policy.

`wasted_at_least` is what no scheduler can avoid that trains groups together, never waits for them and drops none: drawn
from the load alone. A group starts at once, each token takes what it took in that run, and the group is trained on by
the very next step after its longest rollout ended; what has no token younger than the bound then is lost.

Each policy that others have names whose it is and where that was read (`whose`), and runs with the value of what is its
user's to choose (`choice`) that gave most loss tokens per second under that load. `--sweep` finds it, with seed 0, and
tries Tailrace's own `buffer_batches`, which the tables leave at its default.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import gc
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace.simulation import SimulatedRun, SimulationPlan, simulate
from tailrace.simulation.settings import LognormalLengths

SEEDS = 3
NO_BOUND = 10_000


def lognormal(mean_log: float, sigma: float, task_sigma: float, cap: int = 16_384) -> dict[str, Any]:
    return {"mean_log": mean_log, "sigma": sigma, "task_sigma": task_sigma, "cap": cap}


LOADS: dict[str, dict[str, Any]] = {
    "main": {"load": {"lengths": lognormal(6.0, 1.2, 0.7)}},
    "medium": {"load": {"lengths": lognormal(6.3, 0.9, 0.5)}},
    "short": {"load": {"lengths": lognormal(6.5, 0.55, 0.3)}},
    "runaways": {
        "load": {
            "lengths": {
                "kind": "mixture",
                "parts": [
                    {"weight": 9999, "lengths": lognormal(5.4, 0.45, 0.0, cap=1024)},
                    {"weight": 1, "lengths": lognormal(math.log(16_384), 0.0, 0.0)},
                ],
            }
        },
        "trainer": {"train_s": 0.0, "sync_s": 0.0},
    },
}


@dataclass(frozen=True)
class Choice:
    """A setting of `scheduling` that is its user's to choose, and what `--sweep` tries."""

    setting: str
    values: tuple[float, ...]


ABORTED = Choice("over_sampling", (1.1, 1.25, 1.5, 2.0, 3.0))
RESUMED = Choice("over_sampling", (1.25, 1.5, 2.0, 3.0, 4.0))
MAX_IN_FLIGHT = Choice("max_in_flight", (256, 384, 512))
BUFFER = Choice("buffer_batches", (0.5, 0.75, 1.0))


OWN = "Tailrace"


@dataclass(frozen=True)
class Policy:
    """One way to schedule: our scheduler under these settings, not the code of those whose policy it is."""

    schedule: str = "stream"
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    choice: Choice | None = None
    whose: str = OWN
    read_in: str | None = None
    """Repository and file, or paper."""
    differs: str | None = None
    """What is not as theirs."""


POLICIES: dict[str, Policy] = {
    "sync": Policy(
        schedule="sync",
        whose="verl, synchronous",
        read_in="volcengine/verl: docs/advance/one_step_off.md, Background",
    ),
    "one-step-off": Policy(schedule="one-step-off"),
    "one-step-off-wait": Policy(
        schedule="one-step-off",
        scheduling={"on_stale": "wait"},
        whose="verl, one step off",
        read_in="volcengine/verl: docs/advance/one_step_off.md",
        differs="groups start as slots come free, theirs all at once",
    ),
    "stream": Policy(choice=BUFFER),
    "stream-early": Policy(scheduling={"group_release": "early"}, choice=BUFFER),
    "stream-late": Policy(scheduling={"group_release": "early", "min_known_siblings": 7}),
    "stream-wait": Policy(
        scheduling={"on_stale": "wait"},
        choice=MAX_IN_FLIGHT,
        whose="NeMo-RL, asynchronous GRPO",
        read_in="NVIDIA-NeMo/RL: docs/guides/async-grpo.md; ReplayBuffer.sample of nemo_rl/algorithms/async_utils.py",
        differs="theirs fixes a group's step when it starts, and waits for that step's own groups",
    ),
    "stream-restart": Policy(
        scheduling={"on_stale": "restart"},
        read_in="NovaSky-AI/SkyRL: docs/content/docs/tutorials/fully_async.mdx, as what could be done",
    ),
    "stream-drop": Policy(
        scheduling={"on_stale": "drop"},
        choice=MAX_IN_FLIGHT,
        whose="prime-rl, max_off_policy_steps",
        read_in="PrimeIntellect-ai/prime-rl: docs/async.md; src/prime_rl/orchestrator/scheduler.py",
        differs="theirs counts a group's versions while it runs, and trains on what has finished",
    ),
    "admission": Policy(
        scheduling={"max_staleness": NO_BOUND, "buffer_batches": 3.0},
        choice=MAX_IN_FLIGHT,
        whose="AReaL, SkyRL: bounded at admission",
        read_in="inclusionAI/AReaL: areal/core/staleness_manager.py; NovaSky-AI/SkyRL:"
        " docs/content/docs/tutorials/fully_async.mdx",
        differs="their capacity of 5 batches as one that trains, one that runs and 3 that wait",
    ),
    "unbounded": Policy(
        scheduling={"max_staleness": NO_BOUND},
        whose="PipelineRL, max_lag unset",
        read_in="ServiceNow/PipelineRL: conf/base.yaml",
        differs="theirs drops the oldest groups where the trainer is slower (pop_old_data)",
    ),
    "over-abort": Policy(
        schedule="sync",
        scheduling={"on_straggler": "drop"},
        choice=ABORTED,
        whose="slime, ROLL",
        read_in="THUDM/slime: abort() of slime/rollout/sglang_rollout.py; alibaba/ROLL: is_use_additional_prompts of"
        " roll/distributed/scheduler/generate_scheduler.py",
    ),
    "over-requeue": Policy(
        schedule="sync",
        scheduling={"on_straggler": "requeue"},
        choice=ABORTED,
        whose="RollPacker, in part",
        read_in="arXiv:2509.21009, tail batching",
        differs="what was aborted starts again in the next step; theirs saves it up for rounds of its own",
    ),
    "over-resume": Policy(
        scheduling={"max_staleness": NO_BOUND, "on_straggler": "resume_next_step"},
        choice=RESUMED,
        whose="slime --partial-rollout, APRIL",
        read_in="THUDM/slime: slime/rollout/sglang_rollout.py; RLsys-Foundation/APRIL: README.md",
    ),
    "over-continue": Policy(
        scheduling={"max_staleness": NO_BOUND, "buffer_batches": max(RESUMED.values)},
        choice=RESUMED,
        whose="verl, fully asynchronous",
        read_in="volcengine/verl: docs/advance/fully_async.md, partial_rollout; factor: 1 + staleness_threshold",
        differs="the factor bounds what is in no batch; theirs what starts between two updates of the weights",
    ),
}

BEST: dict[str, dict[str, float]] = {
    "main": {"stream-drop": 384, "over-abort": 1.25, "over-requeue": 1.5, "over-resume": 4.0, "over-continue": 4.0},
    "medium": {"stream-wait": 384, "over-abort": 1.25, "over-requeue": 1.25, "over-resume": 4.0, "over-continue": 4.0},
    "short": {"stream-wait": 384, "over-abort": 1.1, "over-requeue": 1.1, "over-resume": 3.0, "over-continue": 4.0},
    "runaways": {"over-abort": 1.1, "over-requeue": 1.1, "over-resume": 3.0, "over-continue": 3.0},
}
"""What `--sweep` found for the policies of others, by load; where nothing is said, the plan's default is best."""

MASKED_AT_MOST = {"main": (0.33, 0.14), "medium": (0.18, 0.06)}
"""With groups released together, and early."""
FASTER_THAN_SYNC = {"main": 5.0, "runaways": 2.5}
"""In groups, and in tokens that bear loss."""
AS_FAST_AS_ANY = {"short": 0.98}
TARGETED = ("stream", "stream-early", "stream-late")
DRAWN_GROUPS = 100_000


@dataclass(frozen=True)
class Row:
    """The figures of one policy under one load: means over the seeds, but for the maximum."""

    case: str
    policy: str
    whose: str
    choice: str | None
    speedup_vs_sync: float
    loss_speedup: float
    length_ratio: float
    loss_length_ratio: float
    wasted: float
    wasted_at_least: float | None
    wholly_stale: float
    masked: float
    loss_tokens_per_s: float
    staleness_mean: float
    staleness_max_trained: int
    engine_utilization: float
    bound_ratio: float
    vs_unbounded: float
    vs_best: float
    target: str | None
    met: bool | None
    missed: str | None


@dataclass(frozen=True)
class Tried:
    """One value of what is a policy's user's to choose, with one seed."""

    case: str
    policy: str
    choice: str
    groups_per_s: float
    loss_tokens_per_s: float
    length_ratio: float
    masked: float
    best: bool
    """Most loss tokens per second among the values of this policy."""


@dataclass(frozen=True)
class Source:
    """Whose policy one is, and where that was read."""

    case: str
    whose: str
    read_in: str | None
    differs: str | None


FULL, QUICK = (80, 20), (14, 4)
"""Steps of a run, and those of them that warm up."""


def plan(case: str, policy: str, seed: int, *, steps: tuple[int, int], chosen: float | None = None) -> SimulationPlan:
    """`chosen` takes the place of what was found best."""
    one = POLICIES[policy]
    value = BEST[case].get(policy) if chosen is None else chosen
    choice = {} if one.choice is None or value is None else {one.choice.setting: value}
    scheduling = {"batch_size": 512, "row_tokens": 32_768, **one.scheduling, **choice}
    return SimulationPlan.model_validate(
        {
            "name": policy,
            "seed": seed,
            "steps": steps[0],
            "warmup_steps": steps[1],
            "schedule": one.schedule,
            **LOADS[case],
            "scheduling": scheduling,
        }
    )


def run(plan: SimulationPlan) -> SimulatedRun:
    logging.disable()
    gc.set_threshold(50_000, 20, 1_000)  # everything here is young or lives to the end
    return simulate(plan)


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each policy")
    parser.add_argument("--sweep", action="store_true", help="find the best values instead")
    parser.add_argument("--policy", action="append", default=[], choices=POLICIES, help="of the sweep; may be repeated")
    arguments = parser.parse_args()
    if arguments.policy and not arguments.sweep:
        parser.error("--policy is of the sweep: give --sweep as well")
    options = kit.common_options(arguments)
    cases = options.choose(list(LOADS)) if options.cases else ["main"]
    if arguments.sweep:
        kit.report("What is theirs to choose", sweep(cases, arguments.policy or POLICIES, options.quick), options)
    else:
        rows = compare(cases, 1 if options.quick else arguments.seeds, quick=options.quick)
        kit.report("The long tail", [*rows, *sources()], options)


def compare(cases: Sequence[str], seeds: int, *, quick: bool) -> list[Row]:
    jobs = [(case, policy, seed) for case in cases for policy in POLICIES for seed in range(seeds)]
    plans = [plan(*job, steps=QUICK if quick else FULL) for job in jobs]
    runs: dict[tuple[str, str], list[SimulatedRun]] = {}
    for (case, policy, seed), result in zip(jobs, run_all(plans), strict=True):
        runs.setdefault((case, policy), []).append(result)
        kit.progress(f"{case}, {policy}, seed {seed}: {result.groups_per_s:.2f} groups/s")
    return [row(case, policy, runs, judged=not quick) for case in cases for policy in POLICIES]


def sweep(cases: Iterable[str], policies: Iterable[str], quick: bool) -> list[Tried]:
    """Every value of every choice."""
    jobs = [
        (case, policy, choice.setting, value)
        for case in cases
        for policy in policies
        if (choice := POLICIES[policy].choice) is not None
        for value in choice.values
    ]
    plans = [plan(case, policy, 0, steps=QUICK if quick else FULL, chosen=value) for case, policy, _, value in jobs]
    runs: list[SimulatedRun] = []
    for (case, policy, setting, value), result in zip(jobs, run_all(plans), strict=True):
        runs.append(result)
        kit.progress(f"{case}, {policy}, {setting} {value:g}: {result.loss_tokens_per_s:,.0f} loss tokens/s")
    most: dict[tuple[str, str], float] = {}
    for (case, policy, *_), result in zip(jobs, runs, strict=True):
        most[case, policy] = max(most.get((case, policy), 0.0), result.loss_tokens_per_s)
    return [
        Tried(
            case=case,
            policy=policy,
            choice=f"{setting} {value:g}",
            groups_per_s=result.groups_per_s,
            loss_tokens_per_s=result.loss_tokens_per_s,
            length_ratio=result.length_ratio,
            masked=result.masked_share,
            best=result.loss_tokens_per_s == most[case, policy],
        )
        for (case, policy, setting, value), result in zip(jobs, runs, strict=True)
    ]


def run_all(plans: Sequence[SimulationPlan]) -> Iterator[SimulatedRun]:
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(run, plans)


def sources() -> list[Source]:
    return [Source(name, one.whose, one.read_in, one.differs) for name, one in POLICIES.items() if one.read_in]


def choice_of(case: str, policy: str) -> str | None:
    """What is its user's to choose, as it ran; None where nothing differs from the plan's default."""
    choice, value = POLICIES[policy].choice, BEST[case].get(policy)
    return None if choice is None or value is None else f"{choice.setting} {value:g}"


def row(case: str, policy: str, runs: dict[tuple[str, str], list[SimulatedRun]], *, judged: bool) -> Row:
    own, sync, unbounded = runs[case, policy], runs[case, "sync"], runs[case, "unbounded"]
    figures = {
        "speedup_vs_sync": mean(own, "groups_per_s") / mean(sync, "groups_per_s"),
        "loss_speedup": mean(own, "loss_tokens_per_s") / mean(sync, "loss_tokens_per_s"),
        "length_ratio": mean(own, "length_ratio"),
        "wasted": mean(own, "wasted_share"),
        "masked": mean(own, "masked_share"),
        "staleness_max_trained": max(one.staleness_max for one in own),
        "vs_unbounded": mean(own, "groups_per_s") / mean(unbounded, "groups_per_s"),
        "vs_best": mean(own, "groups_per_s") / max(mean(runs[case, other], "groups_per_s") for other in POLICIES),
    }
    targets = targets_of(case, policy) if judged else {}
    missed = [name for name, (low, high) in targets.items() if not low <= figures[name] <= high]
    return Row(
        case=case,
        policy=policy,
        whose=POLICIES[policy].whose,
        choice=choice_of(case, policy),
        **figures,
        loss_length_ratio=mean(own, "loss_length_ratio"),
        wasted_at_least=least_wasted(own[0]) if policy == "stream" and case != "runaways" else None,
        wholly_stale=mean(own, "wholly_stale_share"),
        loss_tokens_per_s=mean(own, "loss_tokens_per_s"),
        staleness_mean=mean(own, "staleness_mean"),
        engine_utilization=mean(own, "engine_utilization"),
        bound_ratio=mean(own, "bound_ratio"),
        target=", ".join(f"{name} {told(*bounds)}" for name, bounds in targets.items()) or None,
        met=not missed if targets else None,
        missed=", ".join(missed) or None,
    )


def targets_of(case: str, policy: str) -> dict[str, tuple[float, float]]:
    """Least and greatest value of each figure that has a target."""
    if policy not in TARGETED:
        return {}
    targets = {
        "staleness_max_trained": (0.0, 4.0),
        "wasted": (0.0, 0.0),
        "length_ratio": (0.97, 1.03),
        "vs_unbounded": (0.95, math.inf),
    }
    if case in FASTER_THAN_SYNC:
        targets |= dict.fromkeys(("speedup_vs_sync", "loss_speedup"), (FASTER_THAN_SYNC[case], math.inf))
    if case in MASKED_AT_MOST:
        targets["masked"] = (0.0, MASKED_AT_MOST[case][policy != "stream"])
    if case in AS_FAST_AS_ANY:
        targets["vs_best"] = (AS_FAST_AS_ANY[case], math.inf)
    return targets


def least_wasted(run: SimulatedRun) -> float:
    """See above: the share of tokens in rollouts that are too old by the time the longest of their group has ended."""
    engines, lengths, group_size = run.plan.engines, run.plan.load.lengths, run.plan.load.group_size
    assert isinstance(lengths, LognormalLengths)
    rate = run.engine_utilization * engines.tokens_per_s / engines.replicas
    running = rate * engines.step_base_s / (1 - rate * engines.step_per_running_s)
    token_s = engines.step_base_s + engines.step_per_running_s * running
    step_s = run.plan.scheduling.batch_size / group_size / run.groups_per_s
    draws = np.random.default_rng(run.plan.seed)
    logs = lengths.mean_log + draws.normal(0, lengths.task_sigma, (DRAWN_GROUPS, 1))
    logs = logs + draws.normal(0, lengths.own_sigma, (DRAWN_GROUPS, group_size))
    tokens = np.clip(np.round(np.exp(logs)), 1, lengths.cap)
    since_step_s = draws.uniform(0, step_s, (DRAWN_GROUPS, 1))
    version = np.floor((tokens * token_s + since_step_s) / step_s)
    lost = version.max(axis=1, keepdims=True) + 1 - version > run.plan.max_staleness
    return float(tokens[lost].sum() / tokens.sum())


def told(low: float, high: float) -> str:
    if high == math.inf:
        return f">= {low:g}"
    return f"<= {high:g}" if low == 0 else f"{low:g}-{high:g}"


def mean(runs: Sequence[SimulatedRun], name: str) -> float:
    return math.fsum(getattr(one, name) for one in runs) / len(runs)


if __name__ == "__main__":
    main()
