"""The figures of a run for its summary."""

from __future__ import annotations

import msgspec

from tailrace.records import TerminalState
from tailrace.reporting.gauges import LagGauge, ProcessGauge, SchedulerGauge
from tailrace.reporting.observer import RunObserver
from tailrace.reporting.summary import LedgerSummary, RunSummary
from tailrace.scheduling import Ledger


def with_figures(
    summary: RunSummary,
    ledger: Ledger,
    observer: RunObserver,
    *,
    waits: SchedulerGauge,
    processes: ProcessGauge,
    lag: LagGauge,
) -> RunSummary:
    """The summary with what a run came to, once its ledger is closed and its rollouts began."""
    totals, bias, rewards = observer.totals, observer.bias, observer.totals.rewards
    cpu_s, waited_s = processes.cpu_s, waits.newest.waited_s
    return msgspec.structs.replace(
        summary,
        ledger=LedgerSummary(
            admitted=ledger.admitted,
            in_flight=ledger.in_flight,
            by_state={str(state): ledger.total(state) for state in TerminalState},
            by_reason={str(state): ledger.reasons(state) for state in TerminalState if state != TerminalState.TRAINED},
        ),
        cpu_s=cpu_s,
        peak_rss_bytes=processes.peak_rss_bytes,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        reward_best=max(rewards, default=None),
        evaluations=dict(observer.evaluations),
        tokens_generated=totals.tokens_generated,
        tokens_trained=totals.tokens_trained,
        generation_tokens_per_s=_per(totals.tokens_generated, observer.wall_s),
        training_tokens_per_s=_per(totals.tokens_trained, observer.wall_s),
        tokens_per_cpu_s=_per(totals.tokens_trained, cpu_s),
        length_ratio=bias.length_ratio,
        loss_length_ratio=bias.loss_length_ratio,
        wasted_tokens=bias.wasted_tokens,
        masked_tokens=bias.masked_tokens,
        masked_share=bias.masked_share,
        staleness_mean=totals.staleness_mean if totals.tokens_trained else None,
        staleness_max=totals.staleness_max if totals.tokens_trained else None,
        trainer_wait_s=waits.newest.trainer_waited_s,
        admission_waits_s={str(cause): seconds for cause, seconds in waited_s.items() if seconds > 0},
        loop_lag_max_s=lag.max_s,
    )


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
