"""Timelines of simulated runs, as a picture: which slots were busy, and when the trainer had a batch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tailrace.simulation.run import SimulatedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#1c2a33", "#64748b", "#e3e9ee"
_ENGINES, _TRAINER = "#0e8a87", "#5a7fb8"
_BOTTOM, _BATCH_TOP, _TOP = -0.2, -0.04, 1.05
"""Of the y axis, in shares of the slots: below 0 is the trainer's band."""


def timeline_png(runs: Sequence[SimulatedRun]) -> bytes:
    """One band per run: the share of slots taken, and under it when the trainer had a batch.

    All on one scale, up to the end of the shortest run.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    end_s = min(run.duration_s for run in runs)
    with mpl.rc_context({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 8}):
        figure = Figure(figsize=(9.0, 0.5 + 1.15 * len(runs)), layout="constrained")
        bands = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, run in zip(bands, runs, strict=True):
            _draw(axes, run, end_s)
        bands[-1].set_xlabel("minutes; above: slots taken, below: when the trainer has a batch", color=_MUTED)
        bands[-1].set_xlim(0, end_s / 60)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Axes, run: SimulatedRun, end_s: float) -> None:
    shown = [moment for moment in run.timeline if moment.time_s <= end_s]
    minutes = [moment.time_s / 60 for moment in shown]
    slots = run.plan.engines.replicas * run.plan.engines.slots
    taken = [moment.running / slots for moment in shown]
    training = [_BATCH_TOP if moment.is_training else _BOTTOM for moment in shown]
    axes.fill_between(minutes, taken, step="post", color=_ENGINES, alpha=0.75, linewidth=0)
    axes.fill_between(minutes, _BOTTOM, training, step="post", color=_TRAINER, linewidth=0)
    axes.set_ylim(_BOTTOM, _TOP)
    axes.set_yticks([0, 0.5, 1], ["0", "", "all slots"])
    title = f"{run.plan.name}: {run.groups_per_s * 60:.0f} groups/min, staleness {run.staleness_mean:.1f} on average"
    axes.set_title(title, loc="left", color=_INK, fontsize=9, parse_math=False)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_MUTED)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
