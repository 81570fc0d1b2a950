"""Simulated runs for people, a column each, and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tailrace.scheduling import Verdict
from tailrace.simulation.run import SimulatedRun

_LEGEND = """\
of what is possible: groups per second over the lesser of what engines and trainer can do
engines used: tokens over those of full slots; trainer used: share of the time
length ratio: mean length of trained rollouts over that of all begun
masked, wasted: shares of the tokens of rollouts that ended"""


def comparison(runs: Sequence[SimulatedRun]) -> Table:
    """One column per run; at least one run."""
    table = Table(box=None, pad_edge=False, caption=_LEGEND, caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.plan.name, justify="right", max_width=16)
    columns = [_figures(run) for run in runs]
    for name in columns[0]:
        table.add_row(name, *(figures[name] for figures in columns))
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


def _figures(run: SimulatedRun) -> dict[str, str]:
    groups_per_batch = run.plan.scheduling.batch_size / run.plan.load.group_size
    return {
        "steps per hour": f"{run.groups_per_s / groups_per_batch * 3600:,.0f}",
        "loss tokens per second": f"{run.loss_tokens_per_s:,.0f}",
        "of what is possible": f"{run.bound_ratio:.2f}",
        "engines used": f"{run.engine_utilization:.0%}",
        "trainer used": f"{run.trainer_utilization:.0%}",
        "staleness, mean": f"{run.staleness_mean:.2f}",
        "staleness, most": str(run.staleness_max),
        "length ratio": f"{run.length_ratio:.2f}",
        "length ratio, with loss": f"{run.loss_length_ratio:.2f}",
        "masked": f"{run.masked_share:.1%}",
        "wasted": f"{run.wasted_share:.1%}",
        "of it masked entirely": f"{run.wholly_stale_share:.1%}",
        "admission held by": _held_by(run),
    }


def _held_by(run: SimulatedRun) -> str:
    """What held admission longest, and for what share of the run; full engines hold nothing up."""
    waits = {verdict: seconds for verdict, seconds in run.waited_s.items() if verdict is not Verdict.ENGINES_FULL}
    longest = max(waits, key=lambda verdict: waits[verdict], default=None)
    if longest is None or waits[longest] < 0.01 * run.duration_s:
        return "nothing"
    return f"{longest.replace('_', ' ')}, {waits[longest] / run.duration_s:.0%}"
