"""What is ready, judged by the age of its tokens as it is about to be trained on."""

from __future__ import annotations

from collections.abc import Generator

from tailrace.batching import STALE, SampledGroup, sample_group
from tailrace.records import Outcome
from tailrace.scheduling.ledger import Accounts, UntrainableStreak
from tailrace.scheduling.outstanding import Outstanding, ReadyGroup
from tailrace.scheduling.staleness import RESTARTED, StalePolicy
from tailrace.scheduling.tasks import TaskStream
from tailrace.tracing.phases import phase

SAMPLED_AT_ONCE = 32
"""Rollouts in one slice."""


class Judge:
    """Makes samples of groups. Pure but for the accounts: rollouts that bear no loss end here, each with its reason."""

    def __init__(
        self,
        tasks: TaskStream,
        outstanding: Outstanding,
        accounts: Accounts,
        stale: StalePolicy,
        untrainable: UntrainableStreak,
    ) -> None:
        self._tasks, self._outstanding, self._accounts = tasks, outstanding, accounts
        self._stale, self._untrainable = stale, untrainable

    def sample(self, ready: ReadyGroup, trainer_version: int) -> SampledGroup | None:
        """One group's samples for a trainer of at most this version; None where none of it is trained on now.

        Then its task is started again, or over where nothing is left of its group. Raises `TrainingError` where that is
        so for too long.
        """
        taken = self._sampled(ready, trainer_version)
        if self._discards(ready, taken):
            return None
        self._end_filtered(ready, taken)
        return taken

    def review(self, trainer_version: int) -> Generator[None, None, None]:
        """Take out that of which a trainer of at most this version trains on nothing: what stays is worth its place.

        It ends as under `sample`. The caller awaits between slices. Raises `TrainingError` as `sample` does.
        """
        outstanding, since_yield = self._outstanding, 0
        outstanding.allow(self._stale.oldest_allowed(trainer_version))
        while outstanding.doubtful:
            ready = outstanding.doubtful.popleft()
            if self._discards(ready, self._sampled(ready, trainer_version)):
                outstanding.discard(ready)
            else:
                outstanding.keep(ready)
            since_yield += len(ready.group.rollouts)
            if since_yield >= SAMPLED_AT_ONCE:
                since_yield = 0
                yield

    def _sampled(self, ready: ReadyGroup, trainer_version: int) -> SampledGroup:
        with phase("sample"):
            return sample_group(
                ready.group,
                oldest_version=self._stale.oldest_allowed(trainer_version),
                drop_stale=self._stale.drops_rollouts,
            )

    def _discards(self, ready: ReadyGroup, taken: SampledGroup) -> bool:
        key = ready.opened.key
        # of a part: to start the task again would train on the rest twice
        is_whole = ready.size == ready.opened.size
        has_stale = taken.masked_tokens or any(reason == STALE for _, reason in taken.filtered)
        if has_stale and is_whole and self._stale.restarts_finished(self._tasks.restarts(key)):
            self._accounts.end(ready.group.rollouts, Outcome.filtered(RESTARTED))
            self._tasks.restart(key, is_stale=True)
            return True
        if taken.samples:
            return False
        self._end_filtered(ready, taken)
        self._untrainable.expire(ready.size)
        return True

    def _end_filtered(self, ready: ReadyGroup, taken: SampledGroup) -> None:
        for rollout, reason in taken.filtered:
            self._accounts.end([rollout], Outcome.filtered(reason))
        self._outstanding.give_up(ready.opened, len(taken.filtered))
