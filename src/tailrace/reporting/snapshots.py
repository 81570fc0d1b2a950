"""Takes the live view's snapshots of a training run."""

from __future__ import annotations

from dataclasses import replace

from tailrace.records import TerminalState
from tailrace.reporting.observer import RunObserver
from tailrace.reporting.phase_report import phase_costs
from tailrace.reporting.run_view import RunView, Stage
from tailrace.scheduling import Evaluator, Ledger, SchedulerStatistics, Verdict
from tailrace.tracing.lag import LagStatistics

_WAITING = {
    Verdict.BUDGET_SPENT: " (the staleness budget is spent)",
    Verdict.BUFFER_FULL: " (enough finished groups wait for it)",
}


def snapshot(
    so_far: RunView,
    *,
    observer: RunObserver,
    ledger: Ledger,
    statistics: SchedulerStatistics,
    evaluator: Evaluator,
    lag: LagStatistics,
) -> RunView:
    """Where the run is now: `so_far`, which knows settings, stage and step, with everything else."""
    latest, history = observer.latest, observer.history
    return replace(
        so_far,
        waiting_for=so_far.waiting_for or _waiting_for(so_far, statistics),
        rewards=history.rewards,
        reward_std=latest.get("reward/std"),
        zero_spread_share=latest.get("group/zero_spread_share"),
        completion_tokens=latest.get("rollout/completion_tokens"),
        turns=latest.get("rollout/turns"),
        held_out={name: course.reward_last for name, course in observer.evaluations.items()},
        evaluating_step=evaluator.step,
        evaluated_rollouts=evaluator.ended,
        staleness_mean=latest.get("staleness/mean", 0.0),
        staleness_max=int(latest.get("staleness/max", 0)),
        generation_tokens_per_s=history.generation_tokens_per_s,
        training_tokens_per_s=history.training_tokens_per_s,
        in_flight=statistics.in_flight,
        in_flight_limit=statistics.budget_ceiling,
        ready_groups=statistics.waiting_groups,
        queued_batches=statistics.batches_ahead,
        running_rollouts=statistics.running,
        phases_s={cost.name: cost.values.get("wall_s", 0.0) for cost in phase_costs(latest)},
        lag=lag,
        failures=dict(observer.totals.failures),
        rollouts_trained=ledger.total(TerminalState.TRAINED),
        rollouts_filtered=ledger.total(TerminalState.FILTERED),
        rss_bytes=sum(value for name, value in latest.items() if name.endswith("_rss_bytes")),
    )


def _waiting_for(view: RunView, statistics: SchedulerStatistics) -> str:
    """The stages that have work: whichever of them is stuck holds the run up."""
    if view.stage is Stage.EVALUATING:
        return "the last evaluation"
    if view.stage is Stage.STOPPING:
        return "the trainer's last save"
    busy = []
    if statistics.batches_ahead:
        busy.append(f"the trainer to finish step {view.step + 1}{_WAITING.get(statistics.verdict, '')}")
    if statistics.running:
        busy.append(f"{statistics.running} rollouts to finish")
    return " and ".join(busy) or "groups to be scored"
