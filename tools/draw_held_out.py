"""Draw held-out rewards of runs, one beside the other.

    python tools/draw_held_out.py picture.png runs/one runs/two

Points are the mean reward of each batch, bars 95 % of a held-out mean. Of several environments all are drawn. Runs
whose names differ in a last number only are seeds of one thing: they share a colour, the line is their mean, bars go
from the lowest to the highest. A held-out mean stands at the mean of the versions that sampled it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0e8a87", "#d08a2e", "#5a7fb8", "#a05a8c", "#6b6b6b")
HELD_OUT = re.compile(r"eval/(.+)/reward/mean")
SEED = re.compile(r"-\d+$")

Records = list[dict[str, Any]]


def main() -> None:
    """As the module says."""
    picture, *folders = sys.argv[1:]
    seeds: defaultdict[str, list[Records]] = defaultdict(list)
    for folder in map(Path, folders):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        seeds[SEED.sub("", folder.name)].append([json.loads(line) for line in lines])
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (label, runs), colour in zip(seeds.items(), COLOURS, strict=False):
        draw(axes, label, runs, colour)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(frameon=False, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=160)


def draw(axes: Axes, label: str, runs: list[Records], colour: str) -> None:
    """All seeds of one thing."""
    for records in runs:
        batches = [(record["step"], record["reward/mean"]) for record in records if "reward/mean" in record]
        axes.scatter(*zip(*batches, strict=True), s=8, color=colour, alpha=0.35 / len(runs), linewidths=0)
    for name in sorted({name for record in runs[0] for name in record if HELD_OUT.fullmatch(name)}):
        steps = sorted({record["step"] for records in runs for record in records if name in record})
        versions, means, below, above = zip(*(point(runs, name, step) for step in steps), strict=True)
        axes.errorbar(versions, means, yerr=[below, above], color=colour, label=f"{label}, held out", capsize=2)


def point(runs: list[Records], name: str, step: int) -> tuple[float, float, float, float]:
    """What was measured from a step on: mean version, mean reward, and how far the bar goes below and above it."""
    measured = [record for records in runs for record in records if record["step"] == step and name in record]
    of_versions = name.replace("reward/mean", "policy_version")
    version = statistics.fmean(record[f"{of_versions}/{end}"] for record in measured for end in ("min", "max"))
    if len(runs) == 1:
        error = 1.96 * measured[0][name.replace("/mean", "/standard_error")]
        return version, measured[0][name], error, error
    means = [record[name] for record in measured]
    mean = statistics.fmean(means)
    return version, mean, mean - min(means), max(means) - mean


if __name__ == "__main__":
    main()
