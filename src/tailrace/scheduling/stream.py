"""The scheduler of batches: three loops, each waiting for one thing.

    admission   waits for room (engines, buffer, budget, weights), starts the next task's group
    batches     waits for a batch's worth of groups and for the trainer to be at most one batch behind, sends it
    ends        waits for the trainer's steps, gives their rollouts their terminal state

Each group runs in a task of its own (see `groups`). `handle` takes the trainer's events, `weights_installed` the
generators' versions; both wake the loops. Nothing polls, and the cost of an event does not grow with what is in flight:
sums are running sums.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from typing_extensions import override

from tailrace.batching import FormedBatch
from tailrace.batching.slices import in_turns
from tailrace.records import NOTHING_TRAINABLE, PlannedBatch, StepSkipped, StepTrained
from tailrace.scheduling.admission import AdmissionState, Verdict
from tailrace.scheduling.base import Scheduler, SchedulerSetup
from tailrace.scheduling.batches import BatchFormer
from tailrace.scheduling.groups import GroupRunner
from tailrace.scheduling.observer import SchedulerObserver, SchedulerStatistics
from tailrace.scheduling.stragglers import HoldsGroups, Stragglers
from tailrace.scheduling.tasks import TaskStream
from tailrace.tracing.phases import phase

MAX_BATCHES_AHEAD = 2
"""Batches sent and not yet trained: one that is trained on and one that waits, so that the trainer never idles."""

SendBatch: TypeAlias = Callable[[PlannedBatch], Awaitable[None]]
"""Hands a batch over to the trainer; returns once it is accepted.

Must keep nothing of the batch beyond the end of its step: the scheduler frees its rollouts in slices then, while the
last owner of a whole batch frees it at once (16,384 samples: 46 ms in which no other thread runs).
"""


class StreamScheduler(Scheduler):
    """Keeps the engines full within the staleness budget, and the trainer fed with the oldest first.

    Make it, `start` it where training starts, `run` it.
    """

    def __init__(
        self,
        tasks: TaskStream,
        runner: GroupRunner,
        send: SendBatch,
        observer: SchedulerObserver,
        setup: SchedulerSetup,
        *,
        max_steps: int | None = None,
        num_ranks: int = 1,
        holder: HoldsGroups | None = None,
    ) -> None:
        """`max_steps` is the trainer's last step, `num_ranks` are its ranks, to which rows are dealt.

        `holder` sets groups aside, which `on_straggler = resume_next_step` needs.
        """
        super().__init__(tasks, runner, observer, setup)
        self._send, self._max_steps = send, max_steps
        self._stragglers = Stragglers(self._outstanding, holder, setup.settings)
        self._former = BatchFormer(
            *(tasks, self._outstanding, self._judge, setup.settings),
            untrainable=self._untrainable,
            num_ranks=num_ranks,
        )

    @override
    def handle(self, event: StepTrained | StepSkipped) -> None:
        """The trainer is done with the oldest batch sent."""
        formed = self._progress.end_step(event)
        self._trainer_waits.set(not self._progress.sent)
        if isinstance(event, StepTrained) or event.reason == NOTHING_TRAINABLE:
            self._untrainable.step_ended(formed.batch.summary.num_rollouts, taught=isinstance(event, StepTrained))
        self._ended_steps.add(event, formed)
        self._review_running()
        self._outstanding.wake()

    @property
    @override
    def statistics(self) -> SchedulerStatistics:
        return replace(super().statistics, set_aside=self._stragglers.rollouts)

    @property
    @override
    def _has_dispatched(self) -> bool:
        return self._progress.ahead > 0

    @override
    def _before_admission(self) -> None:
        if self._stragglers.are_held and self._progress.is_even:
            self._stragglers.resume()

    @override
    def _admission_state(self) -> AdmissionState:
        settings, progress, outstanding = self._settings, self._progress, self._outstanding
        steps_left = None if self._max_steps is None else self._max_steps - progress.step - progress.ahead
        # with no batch ahead what is ready waits for no trainer but for the rest of its batch, however long that runs
        buffered_batches = settings.buffer_batches if progress.ahead else max(1.0, settings.buffer_batches)
        return AdmissionState(
            running=outstanding.running,
            max_running=self._slots_left,
            waiting_for_trainer=outstanding.ready_rollouts + progress.waiting_rollouts,
            max_waiting=int(buffered_batches * settings.batch_size),
            is_trainer_fed=progress.ahead > 0,
            budget_free=self._accounts.budget_free,
            untaken=outstanding.untaken,
            wanted=None if steps_left is None else steps_left * settings.batch_size,
            step_size=int(settings.over_sampling * settings.batch_size) if settings.over_sampling > 1 else None,
            age=progress.age,
            max_age=0 if self._stragglers.are_held else self._stale.max_staleness,
            trainable_capacity=self._stale.trainable_capacity(progress.age),
        )

    # --- batches -------------------------------------------------------------------------------------------------

    @override
    async def _feed(self) -> None:
        """Send batches. Waits for groups and for the trainer; unblocked by both, and by the end of the tasks."""
        while not self._is_done():
            self._untrainable.require_taught()
            await self._review_ready()
            if not self._may_form():
                await self._outstanding.batches_wake.wait()
                self._outstanding.batches_wake.clear()
                continue
            if formed := await self._form_batch():
                await self._send_batch(formed)
                await self._stragglers.pass_edge()
            del formed  # it lives as long as its step
            self._progress.is_forming = False
            self._review_running()
            self._outstanding.wake()

    def _may_form(self) -> bool:
        outstanding, progress = self._outstanding, self._progress
        if len(progress.sent) >= MAX_BATCHES_AHEAD or not outstanding.ready:
            return False
        if outstanding.ready_size >= self._settings.batch_size:
            is_held = self._stale.holds_batch(outstanding.floors.oldest, progress.trainer_version)
            self._held.set(is_held)
            return not is_held
        if outstanding.floors.oldest is not None or progress.sent or self._ended_steps:
            return False
        may_come = (Verdict.ADMIT, Verdict.WEIGHTS_OLD, Verdict.TRANSPORT_AWAY)
        return self._tasks.is_exhausted or self._verdict() not in may_come

    async def _form_batch(self) -> FormedBatch | None:
        progress = self._progress
        step, trainer_version = progress.step + progress.ahead + 1, progress.trainer_version
        # into the last batch that takes those tokens
        self._release_expiring(self._stale.oldest_allowed(trainer_version))
        progress.is_forming = True
        with phase("form_batch", track="batches", about={"step": step}):
            return await in_turns(self._former.form(step=step, trainer_version=trainer_version))

    async def _send_batch(self, formed: FormedBatch) -> None:
        summary = formed.batch.summary
        self._progress.sent.append(formed)
        self._progress.is_forming = False
        self._trainer_waits.set(False)
        await self._save(summary.step)
        with phase("send_batch", track="batches", num_bytes=formed.batch.num_bytes, about={"step": summary.step}):
            await self._send(formed.batch)
        self._observer.batch_sent(formed)
