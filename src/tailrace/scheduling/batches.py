"""From ready groups to one batch: the oldest first, judged for staleness, laid out in slices.

Pure but for the accounts. The caller awaits between slices, as a batch of thousands of rollouts would hold the event
loop.
"""

from __future__ import annotations

from collections.abc import Generator

from tailrace.batching import FormedBatch, Packing, SampledGroup, form_batch, sample_group
from tailrace.records import Outcome
from tailrace.scheduling.ledger import Accounts, UntrainableStreak
from tailrace.scheduling.outstanding import Outstanding, ReadyGroup
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import RESTARTED, StalePolicy
from tailrace.scheduling.tasks import TaskStream
from tailrace.tracing.phases import phase

SAMPLED_AT_ONCE = 32
"""Rollouts in one slice."""


class BatchFormer:
    """Forms batches of what is ready."""

    def __init__(
        self,
        tasks: TaskStream,
        outstanding: Outstanding,
        accounts: Accounts,
        stale: StalePolicy,
        settings: SchedulingSettings,
        *,
        untrainable: UntrainableStreak,
        num_ranks: int = 1,
    ) -> None:
        """`num_ranks` are the trainer's."""
        self._packing = Packing(settings.row_tokens, num_ranks)
        self._tasks, self._outstanding, self._accounts = tasks, outstanding, accounts
        self._stale, self._settings, self._untrainable = stale, settings, untrainable

    def form(self, *, step: int, trainer_version: int) -> Generator[None, None, FormedBatch | None]:
        """The batch of `step`, for a trainer of at most `trainer_version`; None where nothing in it would bear loss.

        Raises `TrainingError` when that is so for too long.
        """
        sampled: list[SampledGroup] = []
        size = since_yield = 0
        while self._outstanding.ready and size < self._settings.batch_size:
            ready = self._outstanding.take()
            taken = self._sample(ready, trainer_version)
            if taken is not None and taken.samples:
                sampled.append(taken)
                size += ready.size
            since_yield += len(ready.group.rollouts)
            if since_yield >= SAMPLED_AT_ONCE:
                since_yield = 0
                yield
        if not sampled:
            return None
        formed = yield from form_batch(
            sampled,
            step=step,
            trainer_version=trainer_version,
            packing=self._packing,
            whiten_advantages=self._settings.whiten_advantages,
        )
        self._untrainable.formed()
        return formed

    def _sample(self, ready: ReadyGroup, trainer_version: int) -> SampledGroup | None:
        """One group's samples; None where it is started again instead."""
        key = ready.opened.key
        with phase("sample"):
            taken = sample_group(
                ready.group,
                oldest_version=self._stale.oldest_allowed(trainer_version),
                drop_stale=self._stale.drops_rollouts,
            )
        # of a part: to start the task again would train on the rest twice
        is_whole = ready.size == ready.opened.size
        if taken.masked_tokens and is_whole and self._stale.restarts_finished(self._tasks.restarts(key)):
            self._accounts.end(ready.group.rollouts, Outcome.filtered(RESTARTED))
            self._tasks.restart(key)
            return None
        for rollout, reason in taken.filtered:
            self._accounts.end([rollout], Outcome.filtered(reason))
        self._tasks.end(key, trained=bool(taken.samples))
        if not taken.samples:
            self._untrainable.expire(ready.size)
        return taken
