"""May another group start now? A pure decision over plain numbers."""

from __future__ import annotations

import enum

import msgspec


class Verdict(enum.StrEnum):
    """Whether a group may start, or what holds it."""

    ADMIT = "admit"
    ENGINES_FULL = "engines_full"
    """Every slot of the engines is busy."""
    BUFFER_FULL = "buffer_full"
    """Enough finished groups wait for the trainer."""
    BUDGET_SPENT = "budget_spent"
    """The staleness budget is spent: the engines wait for the trainer."""
    WEIGHTS_OLD = "weights_old"
    """A group that starts now would be too old for its batch."""
    STEP_STARTED = "step_started"
    """Under over-sampling: all groups of this step have started."""
    ENVIRONMENTS_FAIL = "environments_fail"
    """Every environment that has tasks pauses, since it failed: see `backoff`."""
    TRANSPORT_AWAY = "transport_away"
    """What carries things to the trainer is away: what is finished meanwhile waits, and nothing new starts."""
    ENOUGH = "enough"
    """What was started fills every remaining step."""


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decision needs, in rollouts unless named otherwise."""

    running: int
    """Rollouts whose agents run."""
    max_running: int
    waiting_for_trainer: int
    """In finished groups that are in no batch, and in batches that wait."""
    max_waiting: int
    is_trainer_fed: bool
    """Whether a batch is on its way or being trained on."""
    budget_free: int
    untaken: int
    """In started groups that are in no batch."""
    wanted: int | None = None
    """What the remaining steps can take; None where training has no last step."""
    step_size: int | None = None
    """What one step starts, under over-sampling; else None."""
    age: int = 0
    """Versions by which a token sampled now will trail the next batch."""
    max_age: int = 0
    trainable_capacity: int | None = None
    """What the batches can take for which a token sampled now is young enough; None: no limit."""


def may_admit(state: AdmissionState) -> Verdict:
    """Keep every slot busy and a small buffer ahead of the trainer, no more.

    A full buffer holds even idle engines while the trainer is fed: a group alone on them would cost nearly as many
    engine steps as full engines do. Once what was started fills the remaining steps, nothing more starts and the last
    step waits for stragglers: filling it with quicker groups would waste them and bias it toward short rollouts.

    >>> state = AdmissionState(
    ...     running=8, max_running=64, waiting_for_trainer=0, max_waiting=64, is_trainer_fed=True, budget_free=10,
    ...     untaken=8, wanted=16,
    ... )
    >>> may_admit(state)
    <Verdict.ADMIT: 'admit'>
    """
    if state.wanted is not None and state.untaken >= state.wanted:
        return Verdict.ENOUGH
    if state.step_size is not None and state.untaken >= state.step_size:
        return Verdict.STEP_STARTED
    if state.budget_free <= 0:
        return Verdict.BUDGET_SPENT
    is_capacity_spent = state.trainable_capacity is not None and state.untaken >= state.trainable_capacity
    if state.age > state.max_age or is_capacity_spent:
        return Verdict.WEIGHTS_OLD
    if state.running >= state.max_running:
        return Verdict.ENGINES_FULL
    if state.waiting_for_trainer >= state.max_waiting and (state.running > 0 or state.is_trainer_fed):
        return Verdict.BUFFER_FULL
    return Verdict.ADMIT
