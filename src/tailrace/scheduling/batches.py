"""From ready groups to one batch: the oldest first, judged for staleness, laid out in slices.

Pure but for the accounts. The caller awaits between slices, as a batch of thousands of rollouts would hold the event
loop.
"""

from __future__ import annotations

from collections.abc import Generator

from tailrace.batching import FormedBatch, Packing, SampledGroup, form_batch
from tailrace.scheduling.judging import SAMPLED_AT_ONCE, Judge
from tailrace.scheduling.ledger import UntrainableStreak
from tailrace.scheduling.outstanding import Outstanding
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.tasks import TaskStream


class BatchFormer:
    """Forms batches of what is ready."""

    def __init__(
        self,
        tasks: TaskStream,
        outstanding: Outstanding,
        judge: Judge,
        settings: SchedulingSettings,
        *,
        untrainable: UntrainableStreak,
        num_ranks: int = 1,
    ) -> None:
        """`num_ranks` are the trainer's."""
        self._packing = Packing(settings.row_tokens, num_ranks)
        self._tasks, self._outstanding, self._judge = tasks, outstanding, judge
        self._settings, self._untrainable = settings, untrainable

    def form(self, *, step: int, trainer_version: int) -> Generator[None, None, FormedBatch | None]:
        """The batch of `step`, for a trainer of at most `trainer_version`; None where nothing in it would bear loss.

        Raises `TrainingError` when that is so for too long.
        """
        yield from self._judge.review(trainer_version)
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
