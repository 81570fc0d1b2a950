"""The live view's snapshot of a training run."""

from __future__ import annotations

from tailrace.config import RunSettings
from tailrace.records import TerminalState
from tailrace.reporting.phase_report import phase_costs
from tailrace.reporting.run_view import RunView
from tailrace.run.orchestrator import Orchestrator
from tailrace.scheduling import SchedulerStatistics, Verdict
from tailrace.tracing.lag import LoopLagMonitor

_WAITING = {
    Verdict.BUDGET_SPENT: " (the staleness budget is spent)",
    Verdict.BUFFER_FULL: " (enough finished groups wait for it)",
}


def run_view(
    settings: RunSettings, orchestrator: Orchestrator | None, lag: LoopLagMonitor, elapsed_s: float
) -> RunView:
    """Where the run is now."""
    start = RunView(
        name=settings.name,
        model=settings.model.name,
        environments=[environment.id or environment.name for environment in settings.environments],
        waiting_for=orchestrator.starting if orchestrator else "the processes to start",
        elapsed_s=elapsed_s,
        max_steps=settings.max_steps,
        max_staleness=settings.max_staleness,
    )
    if orchestrator is None or orchestrator.scheduler is None or orchestrator.observer is None:
        return start
    scheduler, observer = orchestrator.scheduler, orchestrator.observer
    statistics, latest, ledger = scheduler.statistics, observer.latest, scheduler.ledger
    return RunView(
        name=start.name,
        model=start.model,
        environments=start.environments,
        stage=orchestrator.stage,
        waiting_for=_waiting_for(orchestrator, statistics),
        elapsed_s=elapsed_s,
        step=orchestrator.step,
        max_steps=start.max_steps,
        rewards=observer.history.rewards,
        reward_std=latest.get("reward/std"),
        zero_spread_share=latest.get("group/zero_spread_share"),
        completion_tokens=latest.get("rollout/completion_tokens"),
        turns=latest.get("rollout/turns"),
        held_out={name: course.reward_last for name, course in observer.evaluations.items()},
        evaluating_step=orchestrator.evaluator.step if orchestrator.evaluator else None,
        evaluated_rollouts=orchestrator.evaluator.ended if orchestrator.evaluator else 0,
        policy_version=orchestrator.version,
        staleness_mean=latest.get("staleness/mean", 0.0),
        staleness_max=int(latest.get("staleness/max", 0)),
        max_staleness=start.max_staleness,
        generation_tokens_per_s=observer.history.generation_tokens_per_s,
        training_tokens_per_s=observer.history.training_tokens_per_s,
        in_flight=statistics.in_flight,
        in_flight_limit=statistics.budget_ceiling,
        ready_groups=statistics.waiting_groups,
        groups_per_batch=_groups_per_batch(settings),
        queued_batches=statistics.batches_ahead,
        running_rollouts=statistics.running,
        phases_s={cost.name: cost.values.get("wall_s", 0.0) for cost in phase_costs(latest)},
        lag=lag.snapshot(),
        failures=dict(observer.totals.failures),
        rollouts_trained=ledger.total(TerminalState.TRAINED),
        rollouts_filtered=ledger.total(TerminalState.FILTERED),
        rss_bytes=sum(value for name, value in latest.items() if name.endswith("_rss_bytes")),
    )


def _groups_per_batch(settings: RunSettings) -> int:
    """How many groups fill a batch, of environments in the mix that their weights ask for."""
    weights = sum(environment.weight for environment in settings.environments)
    rollouts = sum(settings.group_size(environment) * environment.weight for environment in settings.environments)
    return round(settings.scheduling.batch_size * weights / rollouts)


def _waiting_for(orchestrator: Orchestrator, statistics: SchedulerStatistics) -> str:
    """The stages that have work: whichever of them is stuck holds the run up."""
    if orchestrator.stage == "evaluating":
        return "the last evaluation"
    if orchestrator.stage == "stopping":
        return "the trainer's last save"
    busy = []
    if statistics.batches_ahead:
        busy.append(f"the trainer to finish step {orchestrator.step + 1}{_WAITING.get(statistics.verdict, '')}")
    if statistics.running:
        busy.append(f"{statistics.running} rollouts to finish")
    return " and ".join(busy) or "groups to be scored"
