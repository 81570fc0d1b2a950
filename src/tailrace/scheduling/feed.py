"""The scheduler of samples: hands them one at a time to a trainer that is not ours, and believes what that tells.

    admission    as ever: while there is room, and a consumer that waits makes room
    hand-over    waits for a credit and for a group, the oldest first; judges it by the version told of last; offers it
    reports      `tell`: who took what, steps and what they were taken on, who is lost; each gives credits back

Nothing here counts to an end. What a trainer takes for a step, and how many steps it takes, is its own affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tailrace.batching import STALE, FormedBatch, SampledGroup, reported_batch
from tailrace.errors import Misreported
from tailrace.records import (
    ConsumerJoined,
    ConsumerLost,
    FeedReport,
    FeedSample,
    Outcome,
    SampleId,
    SamplesDropped,
    SamplesTaken,
    SamplesWanted,
    StepDone,
    StepSkipped,
    StepTrained,
    TrainingBegan,
    sample_of,
)
from tailrace.scheduling.admission import AdmissionState
from tailrace.scheduling.base import Scheduler, SchedulerSetup
from tailrace.scheduling.dispatched import DispatchedRollout, DispatchedSample, DispatchedSamples
from tailrace.scheduling.groups import GroupRunner
from tailrace.scheduling.observer import SchedulerObserver
from tailrace.scheduling.outstanding import ReadyGroup
from tailrace.scheduling.progress import Progress
from tailrace.scheduling.settings import WINDOW_BATCHES
from tailrace.scheduling.tasks import TaskStream
from tailrace.tracing.phases import phase
from tailrace.transport.samples.stream import SampleSender

_logger = logging.getLogger(__name__)

_TOKEN_BYTES = 13
"""Of the columns of a token."""


@dataclass(frozen=True, slots=True)
class FeedFigures:
    """Of a feed, since this start of the run began, or as of now."""

    consumers: int
    """That are there."""
    in_hand: int
    """Samples handed over that no step was told of."""
    taken: int
    """Of those, samples that consumers have."""
    returned: int
    """Samples that were given back by consumers that were lost."""
    trained_again: int
    """Samples that were told of once they were over."""
    wanted: int
    """Samples that consumers cannot go on without."""


class FeedScheduler(Scheduler):
    """Keeps the engines full within the staleness budget, and an outside trainer fed with the oldest first."""

    def __init__(
        self,
        tasks: TaskStream,
        runner: GroupRunner,
        stream: SampleSender,
        observer: SchedulerObserver,
        setup: SchedulerSetup,
        *,
        retained_bytes: int = 0,
    ) -> None:
        """Samples of steps that no durable checkpoint has are kept, so many bytes of their tokens at most.

        They are for a trainer that comes back from further back.
        """
        super().__init__(tasks, runner, observer, setup)
        self._stream = stream
        self._dispatched = DispatchedSamples(WINDOW_BATCHES * setup.settings.batch_size)
        self._carrying = asyncio.Lock()
        """So that nothing is offered again before it was released."""
        self._reported: dict[int, FormedBatch] = {}
        """Steps that were told of, until their event comes."""
        self._newest_step = -1
        """That any life of the trainer told of; below 0, the trainer has not begun."""
        self._retained = _Retained(retained_bytes)

    # --- reports -----------------------------------------------------------------------------------------------------

    async def tell(self, report: FeedReport) -> None:
        """Take in what a consumer told. What concerns no sample is passed over.

        Raises `Misreported` for what cannot be, of which nothing counts then.
        """
        match report:
            case ConsumerJoined(consumer=consumer):
                self._dispatched.join(consumer)
            case SamplesTaken(consumer=consumer, sample_ids=sample_ids):
                self._dispatched.take(consumer, sample_ids)
            case SamplesWanted(consumer=consumer, samples=samples):
                self._dispatched.want(consumer, samples)
            case SamplesDropped():
                await self._drop(report)
            case TrainingBegan():
                self._begin(report)
            case StepDone():
                await self._end_step(report)
            case ConsumerLost():
                await self._give_back(report)
            case _:
                pass
        self._trainer_waits.set(not self._dispatched.is_fed)
        self._outstanding.wake()

    def saved(self, step: int) -> None:
        """A durable checkpoint contains this step: its samples are never needed again."""
        self._retained.release(step)

    @override
    def handle(self, event: StepTrained | StepSkipped) -> None:
        """A step that was told of: its rollouts reach their terminal state."""
        self._ended_steps.add(event, self._reported.pop(event.step))
        self._review_running()
        self._outstanding.wake()

    @property
    def figures(self) -> FeedFigures:
        """Where the feed is."""
        dispatched = self._dispatched
        return FeedFigures(
            consumers=len(dispatched.consumers),
            in_hand=len(dispatched.in_hand),
            taken=len(dispatched.in_hand) - dispatched.waiting,
            returned=dispatched.returns,
            trained_again=dispatched.trained_again,
            wanted=dispatched.wanted,
        )

    @property
    def num_consumers(self) -> int:
        """Ranks of the trainer that are there."""
        return len(self._dispatched.consumers)

    def describe_waiting(self) -> str:
        """For people: what a feed in which nothing moves waits for; empty where that is not the trainer."""
        dispatched = self._dispatched
        if self._newest_step < 0 or not dispatched.consumers:
            return "a consumer of the stream of samples: no rank of the outside trainer is there"
        if self._progress.age > self._stale.max_staleness:
            return (
                f"the outside trainer to write weights: it is at version {self._progress.version}, and what is sampled "
                "now would be older than scheduling.max_staleness allows"
            )
        if dispatched.is_fed:
            return f"the outside trainer to train on the {len(dispatched.in_hand)} samples that it was handed"
        return ""

    # --- admission ---------------------------------------------------------------------------------------------------

    @override
    def _admission_state(self) -> AdmissionState:
        """A consumer that waits stands at one version: what it has ages by nothing, and takes no part of the budget."""
        settings, outstanding, dispatched = self._settings, self._outstanding, self._dispatched
        untaken = self._accounts.ledger.in_flight - dispatched.taken_rollouts
        buffered_batches = settings.buffer_batches if dispatched.is_fed else max(1.0, settings.buffer_batches)
        return AdmissionState(
            running=outstanding.running,
            max_running=self._slots_left,
            waiting_for_trainer=outstanding.ready_rollouts + dispatched.waiting,
            max_waiting=int(buffered_batches * settings.batch_size),
            is_trainer_fed=dispatched.is_fed,
            budget_free=max(self._accounts.budget_free, dispatched.wanted - untaken),
            untaken=outstanding.untaken,
            age=self._progress.age,
            max_age=self._stale.max_staleness,
        )

    @property
    @override
    def _has_dispatched(self) -> bool:
        """What a consumer has that cannot go on without more is nothing to wait for, once there is no more."""
        dispatched = self._dispatched
        return bool(self._reported or dispatched.returned or dispatched.waiting or dispatched.is_fed)

    # --- hand-over ---------------------------------------------------------------------------------------------------

    @override
    async def _feed(self) -> None:
        """Offer samples. Waits for credits and for groups; unblocked by both, and by the end of the tasks."""
        while not self._is_done():
            await self._review_ready()
            if self._may_dispatch():
                await self._dispatch()
                continue
            await self._outstanding.batches_wake.wait()
            self._outstanding.batches_wake.clear()

    def _may_dispatch(self) -> bool:
        return self._dispatched.credits_free > 0 and bool(self._dispatched.returned or self._outstanding.ready)

    async def _dispatch(self) -> None:
        """What was given back before anything else, then the oldest group; as the version of now allows."""
        async with self._carrying:
            if not self._may_dispatch():  # what was given back is over
                return
            handed = self._judged_again() if self._dispatched.returned else self._judged(self._outstanding.take())
            self._dispatched.dispatch(handed)
            self._trainer_waits.set(not self._dispatched.is_fed)
            with phase("offer_samples", track="batches"):
                await self._stream.offer([self._offered(one) for one in handed])
        self._outstanding.wake()

    def _judged(self, ready: ReadyGroup) -> list[DispatchedSample]:
        """A group's samples that are young enough; its task is over only once one of them is trained."""
        taken = self._judge.sample(ready, self._progress.version)
        if taken is None:
            return []
        self._untrainable.formed()
        return _handed(taken, ready)

    def _judged_again(self) -> list[DispatchedSample]:
        """Samples that were given back, as the version of now allows; the others end as stale."""
        returned, young = [*self._dispatched.returned.values()], []
        oldest = self._stale.oldest_allowed(self._progress.version)
        for one in returned:
            one.sample = msgspec.structs.replace(one.sample, oldest_version=oldest)
            branch = one.sample.branch
            is_whole = one.loss_tokens == branch.num_completion_tokens
            bears_loss = one.loss_tokens or branch.num_weighted
            if is_whole or (bears_loss and not self._stale.drops_rollouts):
                young.append(one)
                del self._dispatched.returned[one.sample_id]
            else:
                self._dispatched.expire(one, STALE)
                self._end_dropped(one.of)
        return young

    def _offered(self, one: DispatchedSample) -> FeedSample:
        rollout = one.of.rollout
        return FeedSample(
            sample_id=one.sample_id,
            sample=one.sample,
            task_id=rollout.task.task_id,
            reward=0.0 if rollout.reward is None else rollout.reward.value,
            sampling=rollout.sampling,
            trainer_version=self._progress.version,
            group_rollouts=one.of.group_rollouts,
        )

    # --- what is told ------------------------------------------------------------------------------------------------

    def _begin(self, report: TrainingBegan) -> None:
        """The trainer goes on from a step that it was told of; what it gave up with the later ones comes again."""
        if report.step < 0 or report.version < 0:
            raise Misreported(f"the trainer begins after step {report.step}, with version {report.version}")
        if self._newest_step < 0:  # `start` is told the same
            self._newest_step = report.step
            self._progress = Progress(step=report.step, version=report.version, serving_version=report.version)
            return
        if report.step > self._progress.step:
            raise Misreported(
                f"the trainer goes on after step {report.step}, and step {self._progress.step} is the last that it told"
                " of: steps that nobody heard of cannot be accounted for"
            )
        again = self._retained.after(report.step)
        self._dispatched.take_back(again)
        if report.step < self._progress.step:
            lost = self._progress.step - report.step
            _logger.info("the trainer goes on %d steps back; %d samples are handed over again", lost, len(again))
        self._progress.advance(report.step, report.version)

    async def _end_step(self, report: StepDone) -> None:
        self._require_next(report)
        trained = self._dispatched.train(report)
        is_new = report.step > self._newest_step
        groups = _by_group(trained)
        for one in trained:
            one.of.is_over = one.of.is_over or not one.of.open
            self._tasks.end(one.of.ready.opened.key, trained=True)
        formed = reported_batch(groups, step=report.step, trainer_version=self._progress.version)
        self._progress.advance(report.step, report.version)
        self._release_expiring(self._stale.oldest_allowed(report.version))
        self._retained.add(report.step, trained)
        if is_new:
            self._newest_step = report.step
            self._reported[report.step] = formed
        else:
            for group in groups:
                self._accounts.end(group.trained, Outcome.trained(report.step))
        await self._stream.release([one.sample_id for one in trained])
        await self._save(report.step)

    def _require_next(self, report: StepDone) -> None:
        who = f"consumer {report.consumer!r}"
        if self._newest_step < 0:
            raise Misreported(f"{who} told of step {report.step} before it told where training began")
        if report.step <= self._progress.step:
            raise Misreported(
                f"{who} told of step {report.step} after step {self._progress.step}: steps are told of once, in order; "
                "a trainer that goes on from a checkpoint says so first"
            )
        if report.version < self._progress.version:
            raise Misreported(
                f"{who} told of version {report.version} after version {self._progress.version}: versions never run "
                "backwards"
            )

    async def _drop(self, report: SamplesDropped) -> None:
        dropped = self._dispatched.drop(report)
        for one in dropped:
            self._end_dropped(one.of)
        await self._stream.release([one.sample_id for one in dropped])

    def _end_dropped(self, rollout: DispatchedRollout) -> None:
        """One of its samples was dropped: its end where that was the last, by what became of the others."""
        if rollout.open or rollout.is_over:
            return
        rollout.is_over = True
        if rollout.trained_samples:
            self._accounts.end([rollout.rollout], Outcome.trained(self._progress.step))
        else:
            self._accounts.end([rollout.rollout], Outcome.filtered(rollout.reason))
            self._outstanding.give_up(rollout.ready.opened)

    async def _give_back(self, report: ConsumerLost) -> None:
        async with self._carrying:
            given_back = self._dispatched.lose(report.consumer, report.sample_ids)
            lost = (report.consumer, report.reason, len(given_back))
            _logger.warning("consumer %r: %s; %d samples are handed over again", *lost)
            await self._stream.release([one.sample_id for one in given_back])


class _Retained:
    """Samples of steps that no durable checkpoint has, the oldest first, so many bytes of their tokens."""

    def __init__(self, num_bytes: int) -> None:
        self._most_bytes, self._bytes = num_bytes, 0
        self._steps: deque[tuple[int, list[DispatchedSample]]] = deque()

    def add(self, step: int, samples: Iterable[DispatchedSample]) -> None:
        """A step was taken on these."""
        self._steps.append((step, [*samples]))
        self._bytes += _bytes_of(self._steps[-1][1])
        while self._bytes > self._most_bytes:
            self._drop(self._steps.popleft)

    def release(self, step: int) -> None:
        """Forget this step, and all before."""
        while self._steps and self._steps[0][0] <= step:
            self._drop(self._steps.popleft)

    def after(self, step: int) -> list[DispatchedSample]:
        """What later steps were taken on, which is not theirs any more."""
        again: list[DispatchedSample] = []
        while self._steps and self._steps[-1][0] > step:
            again = self._drop(self._steps.pop) + again
        return again

    def _drop(self, pop: Callable[[], tuple[int, list[DispatchedSample]]]) -> list[DispatchedSample]:
        samples = pop()[1]
        self._bytes -= _bytes_of(samples)
        return samples


def _bytes_of(samples: Iterable[DispatchedSample]) -> int:
    return sum(one.sample.num_tokens for one in samples) * _TOKEN_BYTES


def _handed(taken: SampledGroup, ready: ReadyGroup) -> list[DispatchedSample]:
    """A group's samples, each with its rollout."""
    rollouts = {
        rollout.rollout_id: DispatchedRollout(rollout, ready, len(taken.trained), set[SampleId]())
        for rollout in taken.trained
    }
    handed = []
    for sample in taken.samples:
        rollout = rollouts[sample.rollout_id]
        sample_id = sample_of(sample.rollout_id, sample.branch_index)
        rollout.open.add(sample_id)
        handed.append(DispatchedSample(sample_id, sample, rollout))
    return handed


def _by_group(trained: Sequence[DispatchedSample]) -> list[SampledGroup]:
    """What a step was taken on, by group; a rollout counts in the step that took the last of its samples."""
    groups: dict[ReadyGroup, SampledGroup] = {}
    for one in trained:
        rollout = one.of
        group = groups.setdefault(rollout.ready, SampledGroup(rollout.ready.group))
        group.samples.append(one.sample)
        if not rollout.open and not rollout.is_over and rollout.rollout not in group.trained:
            group.trained.append(rollout.rollout)
            group.loss_tokens.append(rollout.loss_tokens)
            group.masked_tokens += rollout.rollout.num_completion_tokens - rollout.loss_tokens
    return [*groups.values()]
