"""From ready groups to one batch: the oldest first, judged for staleness, laid out in slices.

Pure but for the accounts. The caller awaits between slices, as a batch of thousands of rollouts would hold the event
loop.
"""

from __future__ import annotations

from collections.abc import Generator

from tailrace.batching import FormedBatch, Packing, SampledGroup, form_batch
from tailrace.scheduling.judging import Judge
from tailrace.scheduling.ledger import UntrainableStreak
from tailrace.scheduling.outstanding import Outstanding
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import StalePolicy
from tailrace.scheduling.tasks import TaskStream

SAMPLED_AT_ONCE = 32
"""Rollouts in one slice."""


class BatchFormer:
    """Forms batches of what is ready."""

    def __init__(
        self,
        tasks: TaskStream,
        outstanding: Outstanding,
        judge: Judge,
        stale: StalePolicy,
        settings: SchedulingSettings,
        *,
        untrainable: UntrainableStreak,
        num_ranks: int = 1,
    ) -> None:
        """`num_ranks` are the trainer's."""
        self._packing = Packing(settings.row_tokens, num_ranks)
        self._tasks, self._outstanding, self._judge = tasks, outstanding, judge
        self._stale, self._settings, self._untrainable = stale, settings, untrainable

    def review(self, trainer_version: int) -> Generator[None, None, None]:
        """Take out what is too old for a trainer of `trainer_version`, so that all that is ready helps to fill a batch.

        Raises `TrainingError` when nothing else is ready for too long.
        """
        outstanding = self._outstanding
        outstanding.allow(self._stale.oldest_allowed(trainer_version))
        since_yield = 0
        while outstanding.doubtful:
            ready = outstanding.doubtful.popleft()
            if self._judge.discards(ready, trainer_version):
                outstanding.discard(ready)
            else:
                outstanding.keep(ready)
            since_yield += len(ready.group.rollouts)
            if since_yield >= SAMPLED_AT_ONCE:
                since_yield = 0
                yield

    def form(self, *, step: int, trainer_version: int) -> Generator[None, None, FormedBatch | None]:
        """The batch of `step`, for a trainer of at most `trainer_version`; None where nothing in it would bear loss.

        Raises `TrainingError` when that is so for too long.
        """
        yield from self.review(trainer_version)
        sampled: list[SampledGroup] = []
        size = since_yield = 0
        while self._outstanding.ready and size < self._settings.batch_size:
            ready = self._outstanding.take()
            if taken := self._judge.sample(ready, trainer_version):
                self._tasks.end(ready.opened.key, trained=True)
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
