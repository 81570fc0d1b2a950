"""What early release does to the gradient: on drawn groups, and on real runs of the quickstart recipe (alphabet-sort).

    python benchmarks/early_release.py [--json] [--quick] [--case early ...] [--seeds 3] [--steps 60]

`drawn-*` draw groups of 8 as long as those of the main load of longtail.py, without any run. Rewards are normal and
correlate with the logarithm of length inside groups by 0, -0.5 (`short-scores`) or 0.5 (`long-scores`). `early`
releases from four known siblings on, `late` waits for all unless a group outlives the bound of four steps.

`together` and `early` train with groups released that way, and read what the runs wrote of every rollout. Each
advantage of early release is set against what the whole group would have given, the reward less the mean of all
siblings, over the groups whose rollouts all came back. In `early` the advantages are those that were trained on;
`together` replays its groups as they finished, so that both rules see the very same rollouts.

`mean_difference`: of early advantage less whole, over the whole ones' standard deviation; its error beside it.
`variance_ratio`: of early advantages over whole ones. `length_push`: mean of whole advantage times length, which is
standardized in its group: what the gradient tells the policy of length; `length_push_difference` is the early one's
less that, with its error: the bias along length. `reward_length`: correlation of the two inside groups, without which
there is no bias. Errors are standard errors over groups. `reward_last` is the mean of the last ten steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kit  # isort: skip  - before NumPy: pins threads

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.quickstart_runs import metric, summary_of, train_quickstart

from tailrace.scheduling.release import EarlyRelease

RUNS = ("together", "early")
CORRELATIONS = {"independent": 0.0, "short-scores": -0.5, "long-scores": 0.5}
DRAWN = {f"drawn-{rule}-{name}": (rule, name) for rule in ("early", "late") for name in CORRELATIONS}
DRAWN_GROUPS, QUICK_DRAWN_GROUPS = 20_000, 2_000
MEAN_LOG, TASK_SIGMA, OWN_SIGMA, CAP = 6.0, 0.7, math.sqrt(1.2**2 - 0.7**2), 16_384
BOUND_TOKENS = 4 * 32.0 / 0.0288
"""That a rollout samples in four steps of that load."""
SEEDS, STEPS, QUICK_STEPS = 3, 60, 6
GROUP_SIZE, MIN_KNOWN_SIBLINGS = 8, 4


@dataclass(frozen=True)
class Row:
    """The figures of one policy: of all groups of all seeds; those of the runs are means."""

    case: str
    seeds: int
    groups: int
    rollouts: int
    mean_difference: float
    mean_difference_error: float
    variance_ratio: float
    reward_length: float
    length_push: float
    length_push_difference: float
    length_push_error: float
    reward_last: float | None = None
    staleness_mean: float | None = None
    masked: float | None = None
    wasted: float | None = None
    length_ratio: float | None = None
    target: None = None
    met: None = None


@dataclass(frozen=True)
class Compared:
    """One group: what each of its rollouts that was released early was given, and would have been."""

    early: np.ndarray  # [released]
    whole: np.ndarray  # [released]
    rewards: np.ndarray  # [released]
    lengths: np.ndarray  # [released], standardized in the group


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each case")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    seeds, steps = (1, QUICK_STEPS) if options.quick else (arguments.seeds, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="tailrace-early-release-") as folder:
        rows = [
            drawn(case, QUICK_DRAWN_GROUPS if options.quick else DRAWN_GROUPS)
            if case in DRAWN
            else measured(case, Path(folder), seeds=seeds, steps=steps)
            for case in options.choose([*DRAWN, *RUNS])
        ]
    kit.report("Early release", rows, options)


def drawn(case: str, groups: int) -> Row:
    """No run: lengths and rewards are drawn, and each rollout takes as long as it is."""
    rule, name = DRAWN[case]
    correlation, draws, compared = CORRELATIONS[name], np.random.default_rng(0), []
    for _ in range(groups):
        own = draws.normal(0, 1, GROUP_SIZE)
        rewards = correlation * own + math.sqrt(1 - correlation**2) * draws.normal(0, 1, GROUP_SIZE)
        lengths = np.minimum(np.exp(MEAN_LOG + TASK_SIGMA * draws.normal() + OWN_SIGMA * own), CAP)
        order = np.argsort(lengths, kind="stable")
        rewards, lengths = rewards[order], lengths[order]
        given = replayed(rewards) if rule == "early" else replayed_late(rewards, lengths)
        if (one := compared_with_whole(rewards, lengths, given)) is not None:
            compared.append(one)
    return Row(case=case, seeds=1, **figures(compared))


def measured(case: str, folder: Path, *, seeds: int, steps: int) -> Row:
    compared: list[Compared] = []
    summaries: list[dict[str, Any]] = []
    for seed in range(seeds):
        overrides = ("--rollouts.group_size", str(GROUP_SIZE), "--scheduling.group_release", case)
        run = train_quickstart(folder, f"{case}-{seed}", seed=seed, steps=steps, overrides=overrides)
        summaries.append(summary_of(run) | {"reward_last": float(np.mean(metric(run, "reward/mean")[-10:]))})
        compared += [one for group in groups_of(run) if (one := compare(group, replay=case == "together")) is not None]
        kit.progress(f"{case}, seed {seed}: {len(compared)} groups, reward {summaries[-1]['reward_last']:.3f}")
    return Row(
        case=case,
        seeds=seeds,
        **figures(compared),
        reward_last=mean_of(summaries, "reward_last"),
        staleness_mean=mean_of(summaries, "staleness_mean"),
        masked=mean_of(summaries, "masked_share"),
        wasted=math.fsum(one["wasted_tokens"] / one["tokens_generated"] for one in summaries) / seeds,
        length_ratio=mean_of(summaries, "length_ratio"),
    )


def figures(compared: Sequence[Compared]) -> dict[str, Any]:
    """Of all groups, by the names of `Row`."""
    difference = [one.early - one.whole for one in compared]
    early, whole = (np.concatenate([getattr(one, name) for one in compared]) for name in ("early", "whole"))
    rewards, lengths = (np.concatenate([getattr(one, name) for one in compared]) for name in ("rewards", "lengths"))
    push = [one.lengths * apart for one, apart in zip(compared, difference, strict=True)]
    return {
        "groups": len(compared),
        "rollouts": len(early),
        "mean_difference": float(np.concatenate(difference).mean() / whole.std()),
        "mean_difference_error": error_of_mean(difference) / float(whole.std()),
        "variance_ratio": float(early.var() / whole.var()),
        "reward_length": float(np.corrcoef(rewards, lengths)[0, 1]),
        "length_push": float((whole * lengths).mean()),
        "length_push_difference": float(np.concatenate(push).mean()),
        "length_push_error": error_of_mean(push),
    }


def groups_of(run: Path) -> list[list[dict[str, Any]]]:
    """Rollouts of every group that came back whole, as they finished."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            rollout = json.loads(line)
            if rollout["reward"] is not None:
                groups[rollout["group_id"]].append(rollout)
    return [
        sorted(group, key=lambda rollout: rollout["started_s"] + rollout["duration_s"])
        for group in groups.values()
        if len(group) == GROUP_SIZE
    ]


def compare(group: Sequence[dict[str, Any]], *, replay: bool) -> Compared | None:
    """None where every reward is the same, or nothing was released."""
    rewards = np.array([rollout["reward"] for rollout in group])
    if rewards.min() == rewards.max():
        return None
    lengths = np.array([float(rollout["completion_tokens"]) for rollout in group])
    return compared_with_whole(rewards, lengths, replayed(rewards) if replay else recorded(group))


def compared_with_whole(rewards: np.ndarray, lengths: np.ndarray, given: Sequence[float | None]) -> Compared | None:
    numbers = [number for number, advantage in enumerate(given) if advantage is not None]
    if not numbers:
        return None
    spread = lengths.std()
    standardized = (lengths - lengths.mean()) / spread if spread else np.zeros_like(lengths)
    whole = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    early = np.array([given[number] for number in numbers], float)
    return Compared(early, whole[numbers], rewards[numbers] - rewards.mean(), standardized[numbers])


def replayed(rewards: np.ndarray) -> list[float | None]:
    """What early release would have given each rollout, in the order in which they finished."""
    release = EarlyRelease(MIN_KNOWN_SIBLINGS)
    given: list[float | None] = [None] * len(rewards)
    released = [one for reward in rewards for one in release.learn(float(reward))] + release.close()
    for number, advantage in released:
        given[number] = advantage
    return given


def replayed_late(rewards: np.ndarray, lengths: np.ndarray) -> list[float | None]:
    """The same where all siblings are awaited, but no longer than the bound."""
    release = EarlyRelease(GROUP_SIZE - 1)
    given: list[float | None] = [None] * len(rewards)
    released, expired = [], False
    for reward, length in zip(rewards, lengths, strict=True):
        if length > BOUND_TOKENS and not expired:
            released, expired = [*released, *release.expire()], True
        released += release.learn(float(reward))
    for number, advantage in released + release.close():
        given[number] = advantage
    return given


def recorded(group: Sequence[dict[str, Any]]) -> list[float | None]:
    return [rollout["advantage"] if rollout["outcome"]["state"] == "trained" else None for rollout in group]


def error_of_mean(parts: Sequence[np.ndarray]) -> float:
    """Standard error of the mean over all of it, groups being independent and their members not."""
    values = np.concatenate(parts)
    sums = np.array([float((part - values.mean()).sum()) for part in parts])
    return float(math.sqrt((sums**2).sum()) / len(values))


def mean_of(summaries: Sequence[dict[str, Any]], name: str) -> float:
    return math.fsum(float(one[name] or 0.0) for one in summaries) / len(summaries)


if __name__ == "__main__":
    main()
