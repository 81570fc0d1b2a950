"""The stream scheduler: three loops, each waiting for one thing.

    admission   waits for room (engines, buffer, budget), starts the next task's group
    group       one per task: runs its rollouts, scores them at once, hands what is trainable over in arrival order
    batches     waits for a batch's worth of groups and for the trainer to be at most one batch behind, sends it

What the trainer does comes back through `handle`, which frees budget and wakes the loops. Nothing here polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.batching import FormedBatch, compute_advantages, filter_reason, form_batch, sample_group
from tailrace.errors import AccountingError, RequestRefused, RolloutError, TrainingError
from tailrace.records import (
    Batch,
    Group,
    GroupId,
    Outcome,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    Task,
    TerminalState,
)
from tailrace.scheduling.admission import AdmissionState, Verdict, may_admit
from tailrace.scheduling.budget import StalenessBudget
from tailrace.scheduling.ledger import Ledger
from tailrace.scheduling.observer import SchedulerObserver
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.tasks import TaskKey, TaskStream

MAX_BATCHES_AHEAD = 2
"""Batches sent and not yet trained: one that the trainer works on, one that waits, so that it never idles."""

GROUP_TOO_SMALL = "group_too_small"
SCORE_DROPPED = "score_dropped"


class GroupRunner(Protocol):
    """Runs and scores rollouts for the scheduler."""

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        """One attempt at a task. Raises `RolloutError` or `RequestRefused` when this rollout alone is lost."""
        ...

    async def score(self, group: Group) -> list[Group]:
        """Score a complete group; what the result leaves out is dropped. Raises `RolloutError` for the whole group."""
        ...


class SendBatch(Protocol):
    """Hands a batch over to the trainer."""

    async def __call__(self, batch: Batch, /) -> None:
        """Return once the batch is accepted."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Where everything is now. Counts are rollouts unless named otherwise."""

    running: int
    waiting_groups: int
    batches_ahead: int
    in_flight: int
    admitted: int
    budget_free: int
    verdict: Verdict
    waited_s: Mapping[Verdict, float]
    """Seconds that admission was held, by what held it."""


class StreamScheduler:
    """Keeps the engines full within the staleness budget, and the trainer fed in arrival order."""

    def __init__(
        self,
        tasks: TaskStream,
        runner: GroupRunner,
        send: SendBatch,
        observer: SchedulerObserver,
        *,
        settings: SchedulingSettings,
        max_staleness: int,
        max_running: int,
        group_sizes: Mapping[str, int],
        max_steps: int | None = None,
        step: int = 0,
        version: int = 0,
    ) -> None:
        """`step` and `version` are those of the trainer's last finished step, `max_steps` is its very last one."""
        self.ledger = Ledger()
        self._tasks = tasks
        self._runner = runner
        self._send = send
        self._observer = observer
        self._settings = settings
        self._max_staleness = max_staleness
        self._max_running = max_running
        self._lent_slots = 0
        self._group_sizes = group_sizes
        self._max_steps = max_steps
        self._step = step
        self._version = version
        self._budget = StalenessBudget((max_staleness + 1) * settings.batch_size)
        self._groups_started = 0
        self._running = 0
        self._open: dict[GroupId, TaskKey] = {}  # started, in no batch yet
        self._ready: deque[Group] = deque()
        self._sent: deque[FormedBatch] = deque()
        self._slots: dict[RolloutId, str] = {}
        self._exhausted = False
        self._barren_rollouts = 0
        self._admission_wake = asyncio.Event()
        self._batches_wake = asyncio.Event()
        self._waited_s = dict.fromkeys(Verdict, 0.0)

    async def run(self) -> None:
        """Schedule until the tasks are exhausted and everything made of them is trained; cancel it to stop earlier.

        Raises `TrainingError` when nothing trainable comes for too long, and what an engine's failure raises.
        """
        async with asyncio.TaskGroup() as running:
            running.create_task(self._form_batches())
            await self._admit(running)

    def handle(self, event: StepTrained | StepSkipped) -> None:
        """The trainer is done with the oldest batch sent."""
        formed = self._sent.popleft()
        if formed.batch.summary.step != event.step:
            raise AccountingError(f"step {event.step} ended, but step {formed.batch.summary.step} was next")
        self._step, self._version = event.step, event.version
        outcome = Outcome.trained(event.step) if isinstance(event, StepTrained) else Outcome.filtered(event.reason)
        for group in formed.groups:
            self._end_all(group.trained, outcome)
        self.ledger.check()
        self._observer.step_ended(event, formed)
        self._wake()

    def lend(self, slots: int) -> None:
        """From now on leave so many of the engines' slots to somebody else; what runs in them goes on to its end."""
        self._lent_slots = slots
        self._wake()

    def finish(self, reason: str) -> None:
        """The run is over: whatever is still in flight is cancelled, and the ledger must balance."""
        for rollout_id in self.ledger.in_flight_ids():
            self.ledger.end(rollout_id, Outcome.cancelled(reason))
        self.ledger.check()

    @property
    def statistics(self) -> SchedulerStatistics:
        """Where everything is now."""
        return SchedulerStatistics(
            running=self._running,
            waiting_groups=len(self._ready),
            batches_ahead=len(self._sent),
            in_flight=self.ledger.in_flight,
            admitted=self.ledger.admitted,
            budget_free=self._budget.free,
            verdict=self._verdict(),
            waited_s=dict(self._waited_s),
        )

    # --- admission -----------------------------------------------------------------------------------------------

    async def _admit(self, running: asyncio.TaskGroup) -> None:
        """Start groups. Waits for room; unblocked by finished rollouts, sent batches and trained steps."""
        while True:
            verdict = self._verdict()
            if verdict is not Verdict.ADMIT:
                await self._wait_for_room(verdict)
                continue
            key = self._tasks.draw()
            if key is None:
                self._exhausted = True
                self._wake()
                return
            self._start_group(running, key)

    async def _wait_for_room(self, verdict: Verdict) -> None:
        clock = asyncio.get_running_loop().time
        since = clock()
        self._admission_wake.clear()
        await self._admission_wake.wait()
        self._waited_s[verdict] += clock() - since

    def _verdict(self) -> Verdict:
        waiting = sum(len(group.rollouts) for group in self._ready)
        waiting += sum(formed.batch.summary.num_rollouts for formed in list(self._sent)[1:])
        return may_admit(
            AdmissionState(
                running=self._running,
                max_running=self._max_running - self._lent_slots,
                waiting_for_trainer=waiting,
                max_waiting=int(self._settings.buffer_batches * self._settings.batch_size),
                is_trainer_fed=bool(self._sent),
                budget_free=self._budget.free,
                untaken=sum(self._group_sizes[key.environment] for key in self._open.values()),
                wanted=self._wanted(),
            )
        )

    def _wanted(self) -> int | None:
        if self._max_steps is None:
            return None
        return (self._max_steps - self._step - len(self._sent)) * self._settings.batch_size

    def _start_group(self, running: asyncio.TaskGroup, key: TaskKey) -> None:
        self._groups_started += 1
        group_id = GroupId(f"{self._tasks.task_id(key)}#{self._groups_started}")
        places = [f"{group_id}.{place}" for place in range(self._group_sizes[key.environment])]
        self._open[group_id] = key
        self._budget.acquire(places)
        self._running += len(places)
        running.create_task(self._run_group(key, group_id, places), name=group_id)

    # --- one group -----------------------------------------------------------------------------------------------

    async def _run_group(self, key: TaskKey, group_id: GroupId, places: list[str]) -> None:
        """Run, score and hand over one group. Waits for its task, its own rollouts and its own scoring, no more."""
        task = await self._tasks.make(key)
        async with asyncio.TaskGroup() as attempts:
            started = [attempts.create_task(self._run_place(task, group_id, place)) for place in places]
        rollouts = [rollout for rollout in (attempt.result() for attempt in started) if rollout is not None]
        scored = await self._score(Group(group_id=group_id, task=task, rollouts=rollouts), len(places))
        trainable = [group for group in scored if self._keep(group)]
        if not trainable:
            self._tasks.end(key, trained=False)
        self._open.pop(group_id)
        self._open.update((group.group_id, key) for group in trainable)
        self._ready.extend(trainable)
        self._count_barren(0 if trainable else len(places))
        self._wake()

    async def _run_place(self, task: Task, group_id: GroupId, place: str) -> Rollout | None:
        """One place of a group: the first attempt that finishes, or None after `max_retries` more."""
        try:
            for attempt in range(self._settings.max_retries + 1):
                rollout_id = RolloutId(f"{place}.{attempt}")
                self.ledger.admit(rollout_id)
                rollout = await self._attempt(task, group_id, rollout_id, attempt)
                if rollout is not None:
                    self._slots[rollout_id] = place
                    return rollout
            self._budget.release(place)
            return None
        finally:
            self._running -= 1
            self._wake()

    async def _attempt(self, task: Task, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout | None:
        try:
            rollout = await self._runner.run(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)
        except RolloutError as error:
            outcome, message = Outcome.failed(error.reason), str(error)
        except RequestRefused as error:
            outcome, message = Outcome.failed("request_refused"), str(error)
        else:
            self._observer.rollout_finished(rollout)
            return rollout
        self.ledger.end(rollout_id, outcome)
        self._observer.rollout_ended(rollout_id, None, outcome, message)
        return None

    async def _score(self, group: Group, full_size: int) -> list[Group]:
        """Score a group; every rollout that does not come back ends here, with its reason."""
        if len(group.rollouts) < min(self._settings.min_group_size, full_size):
            self._end_all(group.rollouts, Outcome.filtered(GROUP_TOO_SMALL))
            return []
        try:
            scored = await self._runner.score(group)
        except RolloutError as error:
            self._end_all(group.rollouts, Outcome.failed(error.reason), str(error))
            return []
        kept = {rollout.rollout_id for scored_group in scored for rollout in scored_group.rollouts}
        dropped = [rollout for rollout in group.rollouts if rollout.rollout_id not in kept]
        self._end_all(dropped, Outcome.filtered(SCORE_DROPPED))
        return scored

    def _keep(self, group: Group) -> bool:
        compute_advantages(group, self._settings.advantage)
        reason = filter_reason(group, filter_zero_spread=self._settings.filter_zero_spread)
        self._observer.group_scored(group, reason)
        if reason is not None:
            self._end_all(group.rollouts, Outcome.filtered(reason))
        return reason is None

    def _count_barren(self, rollouts: int) -> None:
        self._barren_rollouts = self._barren_rollouts + rollouts if rollouts else 0
        limit = self._settings.max_barren_batches * self._settings.batch_size
        if self._barren_rollouts >= limit:
            raise TrainingError(
                f"the last {self._barren_rollouts} rollouts held nothing to train on; so far failed: "
                f"{_counted(self.ledger.reasons(TerminalState.FAILED))}; filtered: "
                f"{_counted(self.ledger.reasons(TerminalState.FILTERED))}. The log tells the first failure of each "
                "kind; where rewards never differ inside a group, the task is too hard or too easy for this model"
            )

    # --- batches -------------------------------------------------------------------------------------------------

    async def _form_batches(self) -> None:
        """Send batches. Waits for groups and for the trainer; unblocked by both, and by the end of the tasks."""
        while not self._is_done():
            if not self._may_form():
                await self._batches_wake.wait()
                self._batches_wake.clear()
                continue
            if formed := self._take_batch():
                self._sent.append(formed)
                await self._send(formed.batch)
                self._observer.batch_sent(formed)
            self._wake()

    def _is_done(self) -> bool:
        return self._exhausted and not (self._open or self._ready or self._sent)

    def _may_form(self) -> bool:
        if len(self._sent) >= MAX_BATCHES_AHEAD or not self._ready:
            return False
        if sum(self._nominal_size(group) for group in self._ready) >= self._settings.batch_size:
            return True
        nothing_comes = len(self._open) == len({group.group_id for group in self._ready})
        return nothing_comes and not self._sent and (self._exhausted or self._verdict() is not Verdict.ADMIT)

    def _take_batch(self) -> FormedBatch | None:
        """Form the next batch of the oldest groups, judged against the highest version that can train it."""
        judged_version = self._version + len(self._sent)
        sampled, size = [], 0
        while self._ready and size < self._settings.batch_size:
            group = self._ready.popleft()
            key = self._open.pop(group.group_id, None)
            taken = sample_group(group, judged_version=judged_version, max_staleness=self._max_staleness)
            if key is not None:
                self._tasks.end(key, trained=bool(taken.samples))
            for rollout, reason in taken.filtered:
                self._end_all([rollout], Outcome.filtered(reason))
            if taken.samples:
                sampled.append(taken)
                size += self._nominal_size(group)
        if not sampled:
            return None
        return form_batch(
            sampled,
            step=self._step + len(self._sent) + 1,
            judged_version=judged_version,
            row_tokens=self._settings.row_tokens,
            scheduler_state=self._tasks.state(list(self._open.values())),
        )

    def _nominal_size(self, group: Group) -> int:
        return self._group_sizes[group.task.environment]

    # --- accounting ----------------------------------------------------------------------------------------------

    def _end_all(self, rollouts: Sequence[Rollout], outcome: Outcome, message: str = "") -> None:
        for rollout in rollouts:
            self.ledger.end(rollout.rollout_id, outcome)
            self._budget.release(self._slots.pop(rollout.rollout_id))
            self._observer.rollout_ended(rollout.rollout_id, rollout, outcome, message)

    def _wake(self) -> None:
        self._admission_wake.set()
        self._batches_wake.set()


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
