"""Settings of the scheduler. What concerns a batch's content comes from `BatchingSettings`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from tailrace.batching import BatchingSettings

Schedule: TypeAlias = Literal["sync", "one-step-off", "stream"]
OnStale: TypeAlias = Literal["mask", "wait", "restart", "drop"]
GroupRelease: TypeAlias = Literal["together", "early"]
OnStraggler: TypeAlias = Literal["continue", "requeue", "resume_next_step", "drop"]

MAX_STALENESS: dict[Schedule, int] = {"sync": 0, "one-step-off": 1, "stream": 4}
"""The default of `max_staleness` under each schedule."""

WINDOW_BATCHES = 2
"""Batches' worth of samples that an outside trainer may be handed before it tells of a step: one that it trains on, and
one that it fetched ahead."""


class SchedulingSettings(BatchingSettings):
    """When tasks are admitted, and how old the tokens that are trained on may be."""

    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Oldest tokens that bear loss, in policy versions; unset follows schedule: sync 0, one-step-off 1,"
        " stream 4.",
    )
    on_stale: OnStale = Field(
        "mask",
        description="What happens to tokens older than max_staleness. mask: they stay as context and carry no loss;"
        " nothing is thrown away. wait: a batch whose step would push a group that still runs past the bound is held"
        " until that group ends; the stall is reported. restart: a group that has become too old is stopped and its"
        " task started again, at most max_restarts times, then masked. drop: such a group is stopped and counted.",
    )
    max_restarts: int = Field(
        1, ge=0, description="How often on_stale = restart starts the same task again; after that, stale is masked."
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Rollouts running at once at most; unset follows the generator's slots. The staleness budget,"
        " (max_staleness + 1) * batch_size, bounds it as well.",
    )
    buffer_batches: float = Field(
        0.75,
        ge=0,
        description="Batches' worth of finished groups that may wait behind the batch that is trained on before"
        " admission pauses: what waits only ages. More keeps the trainer fed over longer gaps, with older tokens.",
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        description="Above 1, each step starts this many batches' worth of groups at once and forms its batch of those"
        " that finish first: that edge is what on_straggler speaks of. Batches then favour short rollouts, unless"
        " stragglers go on. Groups that finish beyond the batch are kept for the next one.",
    )
    on_straggler: OnStraggler = Field(
        "continue",
        description="What happens at the edge of a step, under over_sampling above 1, to groups that still run."
        " continue: they go on. requeue: they are stopped and their tasks started from scratch. resume_next_step: they"
        " stop, keep their tokens, and go on together once the step is trained and its weights serve; the next step"
        " starts no earlier, and tokens kept over more than max_staleness steps are too old. drop: they are stopped and"
        " counted.",
    )
    group_release: GroupRelease = Field(
        "together",
        description="When a group's rollouts are trained on. together: once all of them have come back. early: each"
        " once enough siblings are known, before the group's stragglers; its advantage is its reward less the mean of"
        " the siblings known by then. Far fewer tokens become too old. The price: that mean is of the quicker"
        " siblings, so where rewards depend on length the gradient is slightly biased (toward longer rollouts where"
        " the quicker ones score higher), and it is of fewer siblings, which makes it noisier. Needs rewards per"
        " rollout and advantage = mean.",
    )
    min_known_siblings: int | None = Field(
        None,
        ge=1,
        description="Under group_release = early: siblings that must be known before a group's first rollouts are"
        " trained on; unset: half the group. Where waiting for them would make what has finished too old, one is"
        " enough, so with all siblings (group_size - 1) a group is released in parts only where it would be masked.",
    )
    max_retries: int = Field(1, ge=0, description="How often a failed rollout is tried again in its group's place.")
    min_group_size: int = Field(
        2, ge=1, description="A group that lost members is trained on when at least so many came back."
    )
    partial_groups: Literal["keep", "drop"] = Field(
        "keep",
        description="What happens to a group that lost members for good. keep: the others are trained on, see"
        " min_group_size. drop: the whole group is filtered, as it always is where the environment says that it scores"
        " whole groups only.",
    )
    max_barren_batches: int = Field(
        10,
        ge=1,
        description="Batches' worth of rollouts in a row that came back with nothing trainable in them, or of which the"
        " trainer's loss kept nothing, and end the run: finished where nearly all of them earned the highest reward"
        " there was, else failed.",
    )
    max_failing_s: float = Field(
        300.0,
        ge=0,
        description="Seconds in which rollouts fail and none comes back, or groups fail and none is scored, that end"
        " the run: the longest outage of what environments and judges call that it survives. An environment that fails"
        " pauses for up to 30 s at a time.",
    )

    def staleness_bound(self, schedule: Schedule) -> int:
        """`max_staleness`, or what follows from the schedule."""
        return MAX_STALENESS[schedule] if self.max_staleness is None else self.max_staleness

    def staleness_budget(self, max_staleness: int) -> int:
        """Rollouts that may be admitted and not yet trained; what a step starts beyond its batch is among them.

        >>> SchedulingSettings(batch_size=64).staleness_budget(4)
        320
        """
        return int((max_staleness + self.over_sampling) * self.batch_size)


def staleness_contradiction(schedule: object, max_staleness: object) -> str:
    """Why these two, as they were given, cannot both be; empty where they can.

    >>> staleness_contradiction("sync", 0), staleness_contradiction("stream", 7)
    ('', '')
    >>> print(staleness_contradiction("sync", 4))
    schedule = 'sync' means scheduling.max_staleness = 0, but it is 4: leave it out, or write schedule = "stream"
    """
    for name, implied in MAX_STALENESS.items():
        if name == schedule != "stream" and max_staleness not in (None, implied):
            means = f"schedule = {schedule!r} means scheduling.max_staleness = {implied}, but it is {max_staleness}"
            return f'{means}: leave it out, or write schedule = "stream"'
    return ""


class EvaluationSettings(BaseModel):
    """Section `evaluation`: held-out tasks, measured beside training (sampled as `rollouts.evaluation` says)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: int | None = Field(
        None, ge=1, description="Evaluate before the first step and after every so many; unset: never."
    )
    tasks: int = Field(
        64,
        ge=1,
        description="Held-out tasks of each environment that an evaluation takes, once each: the first so many.",
    )
    share: float = Field(
        0.125,
        gt=0,
        lt=1,
        description="Of the rollouts that may run at once, those that are an evaluation's while one goes on.",
    )
    finish_s: float = Field(
        600.0,
        ge=0,
        description="Seconds that an evaluation may go on, in all slots, once training is finished; then it is"
        " cancelled, as it is at once when training is stopped or fails. The last weights of a trainer outside may be"
        " read for as long before.",
    )

    def slots(self, max_running: int) -> int:
        """Rollouts of an evaluation that run at once, out of `max_running`; at least one, and one is left for training.

        >>> EvaluationSettings().slots(64)
        8
        """
        return max(1, min(round(self.share * max_running), max_running - 1))
