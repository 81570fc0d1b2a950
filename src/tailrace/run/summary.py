"""The figures of a run for its summary."""

from __future__ import annotations

from typing import TypedDict

from tailrace.records import TerminalState
from tailrace.reporting.summary import EvaluationSummary, LedgerSummary
from tailrace.run.observer import RunObserver
from tailrace.scheduling import Ledger


class Figures(TypedDict, total=False):
    """The part of `RunSummary` that the observer and the ledger know."""

    ledger: LedgerSummary
    cpu_s: float
    reward_first: float | None
    reward_last: float | None
    reward_best: float | None
    evaluations: dict[str, EvaluationSummary]
    tokens_generated: int
    tokens_trained: int
    generation_tokens_per_s: float | None
    training_tokens_per_s: float | None
    tokens_per_cpu_s: float | None
    length_ratio: float | None
    loss_length_ratio: float | None
    wasted_tokens: int
    masked_tokens: int
    masked_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    trainer_wait_s: float
    admission_waits_s: dict[str, float]
    loop_lag_max_s: float


def figures(ledger: Ledger, observer: RunObserver) -> Figures:
    """What a run came to, once its ledger is closed."""
    totals, bias, rewards = observer.totals, observer.bias, observer.history.rewards
    return Figures(
        ledger=ledger_summary(ledger),
        cpu_s=observer.cpu_s,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        reward_best=max(rewards, default=None),
        evaluations=dict(observer.evaluations),
        tokens_generated=totals.tokens_generated,
        tokens_trained=totals.tokens_trained,
        generation_tokens_per_s=_per(totals.tokens_generated, observer.wall_s),
        training_tokens_per_s=_per(totals.tokens_trained, observer.wall_s),
        tokens_per_cpu_s=_per(totals.tokens_trained, observer.cpu_s),
        length_ratio=bias.length_ratio,
        loss_length_ratio=bias.loss_length_ratio,
        wasted_tokens=bias.wasted_tokens,
        masked_tokens=bias.masked_tokens,
        masked_share=bias.masked_share,
        staleness_mean=totals.staleness_mean if totals.tokens_trained else None,
        staleness_max=totals.staleness_max if totals.tokens_trained else None,
        trainer_wait_s=observer.trainer_waited_s,
        admission_waits_s={str(cause): waited_s for cause, waited_s in observer.waited_s.items() if waited_s > 0},
        loop_lag_max_s=totals.lag_max_s,
    )


def ledger_summary(ledger: Ledger) -> LedgerSummary:
    """The ledger, for people and programs."""
    return LedgerSummary(
        admitted=ledger.admitted,
        in_flight=ledger.in_flight,
        by_state={str(state): ledger.total(state) for state in TerminalState},
        by_reason={str(state): ledger.reasons(state) for state in TerminalState if state is not TerminalState.TRAINED},
    )


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
