"""Draw held-out rewards of runs, one beside the other.

    python tools/draw_held_out.py picture.png runs/one runs/two

Points are the mean reward of each batch, bars 95 % of a held-out mean. Of several environments all are drawn.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0e8a87", "#d08a2e", "#5a7fb8", "#a05a8c")
HELD_OUT = re.compile(r"eval/(.+)/reward/mean")


def main() -> None:
    """As the module says."""
    picture, *folders = sys.argv[1:]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for folder, colour in zip(folders, COLOURS, strict=False):
        draw(axes, Path(folder), colour)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=160)


def draw(axes: Axes, folder: Path, colour: str) -> None:
    """One run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = [(record["step"], record["reward/mean"]) for record in records if "reward/mean" in record]
    axes.scatter(*zip(*batches, strict=True), s=8, color=colour, alpha=0.35, linewidths=0)
    for name in sorted({name for record in records for name in record if HELD_OUT.fullmatch(name)}):
        points = sorted(
            (record["step"], record[name], 1.96 * record[name.replace("/mean", "/standard_error")])
            for record in records
            if name in record
        )
        steps, means, errors = zip(*points, strict=True)
        axes.errorbar(steps, means, yerr=errors, color=colour, label=f"{folder.name}, held out", capsize=2)


if __name__ == "__main__":
    main()
