"""May another group start now? A pure decision over plain numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """Whether a group may start, or what holds it."""

    ADMIT = "admit"
    ENGINES_FULL = "engines_full"
    """Every slot of the engines is busy: starting more would only make it older."""
    BUFFER_FULL = "buffer_full"
    """Enough finished groups wait for the trainer."""
    BUDGET_SPENT = "budget_spent"
    """The staleness budget is spent: the engines wait for the trainer."""
    ENOUGH = "enough"
    """What was started fills every step that is left: more would never be trained on."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """All that the decision needs, in rollouts."""

    running: int
    """Rollouts whose agents run."""
    max_running: int
    waiting_for_trainer: int
    """Rollouts of finished groups that no batch took yet."""
    max_waiting: int
    is_trainer_fed: bool
    """Whether a batch is on its way or being trained on."""
    budget_free: int
    untaken: int
    """Rollouts of groups that were started and that no batch took yet."""
    wanted: int | None
    """Rollouts that the steps that are left can take; None where training has no last step."""


def may_admit(state: AdmissionState) -> Verdict:
    """Just in time: enough running to keep every slot busy and a small buffer ahead of the trainer, no more.

    A full buffer holds even idle engines while the trainer is fed: a group that ran alone meanwhile would cost nearly
    as many engine steps as a full house does.

    >>> state = AdmissionState(
    ...     running=8, max_running=64, waiting_for_trainer=0, max_waiting=64, is_trainer_fed=True, budget_free=10,
    ...     untaken=8, wanted=16,
    ... )
    >>> may_admit(state)
    <Verdict.ADMIT: 'admit'>
    """
    if state.wanted is not None and state.untaken >= state.wanted:
        return Verdict.ENOUGH
    if state.budget_free <= 0:
        return Verdict.BUDGET_SPENT
    if state.running >= state.max_running:
        return Verdict.ENGINES_FULL
    if state.waiting_for_trainer >= state.max_waiting and (state.running > 0 or state.is_trainer_fed):
        return Verdict.BUFFER_FULL
    return Verdict.ADMIT
