"""Simulated runs for people, a column each, and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tailrace.scheduling import Verdict
from tailrace.simulation.run import SimulatedRun

_FIGURES = (
    "steps per hour",
    "loss tokens per second",
    "of what is possible",
    "engines used",
    "trainer used",
    "staleness, mean",
    "staleness, most",
    "length ratio",
    "length ratio, with loss",
    "masked",
    "wasted",
    "of it masked entirely",
    "admission held by",
)

LEGEND = """\
of what is possible: groups per second over the lesser of what engines and trainer can do
engines used: tokens over those of full slots; trainer used: share of the time
length ratio: mean length of trained rollouts over that of all begun
masked, wasted: shares of the tokens of rollouts that ended"""


def comparison(runs: Sequence[SimulatedRun]) -> Table:
    """One column per run."""
    table = Table(box=None, pad_edge=False, caption=LEGEND, caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.plan.name, justify="right", max_width=16)
    for name, *cells in zip(_FIGURES, *(_cells(run) for run in runs), strict=True):
        table.add_row(name, *cells)
    return table


def record(run: SimulatedRun) -> dict[str, object]:
    """The same figures by name, and the staleness distribution, for programs."""
    return {
        "policy": run.plan.name,
        "groups_per_s": run.groups_per_s,
        "loss_tokens_per_s": run.loss_tokens_per_s,
        "bound_ratio": run.bound_ratio,
        "engine_utilization": run.engine_utilization,
        "trainer_utilization": run.trainer_utilization,
        "staleness_mean": run.staleness_mean,
        "staleness_max": run.staleness_max,
        "staleness_shares": {age: tokens / run.measured.loss_tokens for age, tokens in run.staleness.items()},
        "length_ratio": run.length_ratio,
        "loss_length_ratio": run.loss_length_ratio,
        "masked": run.masked_share,
        "wasted": run.wasted_share,
        "wholly_stale": run.wholly_stale_share,
        "waited_s": {str(verdict): seconds for verdict, seconds in run.waited_s.items() if seconds},
        "trainer_waited_s": run.measured.trainer_idle_s,
        "duration_s": run.duration_s,
        "rollouts": {str(outcome): count for outcome, count in run.outcomes.items()},
    }


def _cells(run: SimulatedRun) -> tuple[str, ...]:
    batches = run.plan.scheduling.batch_size / run.plan.load.group_size
    return (
        f"{run.groups_per_s / batches * 3600:,.0f}",
        f"{run.loss_tokens_per_s:,.0f}",
        f"{run.bound_ratio:.2f}",
        f"{run.engine_utilization:.0%}",
        f"{run.trainer_utilization:.0%}",
        f"{run.staleness_mean:.2f}",
        str(run.staleness_max),
        f"{run.length_ratio:.2f}",
        f"{run.loss_length_ratio:.2f}",
        f"{run.masked_share:.1%}",
        f"{run.wasted_share:.1%}",
        f"{run.wholly_stale_share:.1%}",
        _held_by(run),
    )


def _held_by(run: SimulatedRun) -> str:
    """What held admission longest, and for what share of the run; full engines hold nothing up."""
    waits = {verdict: seconds for verdict, seconds in run.waited_s.items() if verdict is not Verdict.ENGINES_FULL}
    longest = max(waits, key=lambda verdict: waits[verdict], default=None)
    if longest is None or waits[longest] < 0.01 * run.duration_s:
        return "nothing"
    return f"{longest.replace('_', ' ')}, {waits[longest] / run.duration_s:.0%}"
