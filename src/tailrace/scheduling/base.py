"""What every scheduler does: it starts groups while there is room, and says where everything is.

Who extends it feeds a trainer with what becomes of the groups (`stream`: batches; `feed`: samples, one at a time, to a
trainer that is not ours). Nothing polls, and the cost of an event does not grow with what is in flight.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.batching.slices import in_turns
from tailrace.records import GroupId, Outcome, RolloutId, StepSkipped, StepTrained
from tailrace.scheduling.admission import AdmissionState, Verdict, may_admit
from tailrace.scheduling.backoff import Backoff
from tailrace.scheduling.groups import GroupPlayer, GroupRunner
from tailrace.scheduling.judging import Judge
from tailrace.scheduling.ledger import Accounts, Ledger, UntrainableStreak
from tailrace.scheduling.observer import SchedulerObserver, SchedulerStatistics, Stopwatch
from tailrace.scheduling.outstanding import Member, OpenGroup, Outstanding
from tailrace.scheduling.progress import EndedSteps, Progress
from tailrace.scheduling.release import EarlyRelease
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import stale_policy
from tailrace.scheduling.tasks import TaskKey, TaskStream

STARTED_AT_ONCE = 16
"""Rollouts started in one turn of the event loop."""

SaveState: TypeAlias = Callable[[int, bytes], Awaitable[None]]
"""Keeps (step, state): where a run resumed after that step goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """What a scheduler is told of its run, whatever it feeds."""

    settings: SchedulingSettings
    max_staleness: int
    max_running: int
    group_sizes: Mapping[str, int]
    """By environment."""
    whole_groups: Collection[str] = ()
    """Environments that need every member of a group."""
    save_state: SaveState | None = None
    """Awaited before the batch of its step is sent, or, of a feed, once a step is told of, before others hear of it."""


class Scheduler(ABC):
    """Keeps the engines full within the staleness budget. Make it, `start` it where training starts, `run` it."""

    def __init__(
        self, tasks: TaskStream, runner: GroupRunner, observer: SchedulerObserver, setup: SchedulerSetup
    ) -> None:
        settings = setup.settings
        self._tasks, self._observer, self._settings = tasks, observer, settings
        self._max_running, self._group_sizes, self._lent_slots = setup.max_running, setup.group_sizes, 0
        self._save_state = setup.save_state
        self._stale = stale_policy(settings, setup.max_staleness)
        self._accounts = Accounts(settings.staleness_budget(setup.max_staleness), observer)
        self._outstanding = outstanding = Outstanding(tasks)
        self._progress = Progress()
        self._backoff = Backoff()
        self._untrainable = UntrainableStreak(
            settings.max_barren_batches * settings.batch_size,
            self.ledger,
            reward_range=tasks.reward_range,
            max_failing_s=settings.max_failing_s,
            outages_s=lambda: self._backoff.outages_s(now_s=self._clock()),
        )
        self._judge = Judge(tasks, outstanding, self._accounts, self._stale, self._untrainable)
        self._player = GroupPlayer(
            *(runner, tasks, outstanding, self._accounts, settings),
            backoff=self._backoff,
            untrainable=self._untrainable,
            whole_groups=setup.whole_groups,
        )
        self._ended_steps = EndedSteps(self._accounts)
        self._id_prefix = ""
        self._groups_started = 0
        self._is_held = False
        self._waited_s = dict.fromkeys(Verdict, 0.0)
        clock = asyncio.get_running_loop().time
        self._clock, self._trainer_waits, self._held = clock, Stopwatch(clock), Stopwatch(clock)

    # --- what a feed implements --------------------------------------------------------------------------------------

    @abstractmethod
    async def _feed(self) -> None:
        """Hand over what is ready, until everything is."""

    @abstractmethod
    def _admission_state(self) -> AdmissionState:
        """What decides whether another group may start."""

    @abstractmethod
    def handle(self, event: StepTrained | StepSkipped) -> None:
        """The trainer is done with a step."""

    @property
    @abstractmethod
    def _has_dispatched(self) -> bool:
        """Whether the trainer has something that no step was told of."""

    def _before_admission(self) -> None:  # noqa: B027 - most have nothing to do
        """Admission is about to look for room."""

    # --- what its owner does -----------------------------------------------------------------------------------------

    def start(self, *, step: int, version: int, serving_version: int, state: bytes = b"", resumes: int = 0) -> None:
        """Begin where training begins: after the trainer's `step`, with weights of `version`.

        `state` is what was saved at that step; empty for a run from the start. `serving_version` is the oldest version
        that a generator serves, to be followed by `weights_installed`. `resumes` is how often the run was started
        before: no name that those starts gave is given again.

        Raises `DataError` for a state of other environments.
        """
        if state:
            self._tasks.restore(state)
        self._progress = Progress(step=step, version=version, serving_version=serving_version)
        self._id_prefix = f"r{resumes}." if resumes else ""

    @property
    def ledger(self) -> Ledger:
        """Every rollout, from admission to its end."""
        return self._accounts.ledger

    async def run(self) -> None:
        """Schedule until the tasks are exhausted and everything made of them is trained; cancel it to stop earlier.

        Raises `TrainingError` when nothing trainable comes for too long, and what an engine's failure raises.
        """
        self._trainer_waits.set(True)
        async with asyncio.TaskGroup() as running:
            feeding = running.create_task(self._feed())
            ending = running.create_task(self._end_steps())
            try:
                await self._admit(running)
            finally:
                await self._cancel_groups(feeding)
            ending.cancel()

    def weights_installed(self, version: int) -> None:
        """No generator serves anything older than `version` from now on."""
        self._progress.install(version)
        self._outstanding.wake()

    def weights_not_installed(self, version: int) -> None:
        """Stop waiting for `version`: it could not be installed, and the old weights go on serving."""
        self._progress.stop_awaiting(version)
        self._outstanding.wake()

    def lend(self, slots: int) -> None:
        """From now on leave this number of engine slots free; what runs in them goes on to its end."""
        self._lent_slots = slots
        self._outstanding.wake()

    def resize(self, slots: int) -> None:
        """Engines have this number of slots from now on; what runs beyond them goes on to its end.

        With none at all a group starts nevertheless, and waits for one: else batches would be closed without it.
        """
        self._max_running = max(1, slots)
        self._outstanding.wake()

    def hold(self, is_held: bool) -> None:
        """What carries things to the trainer is away, or back: nothing starts meanwhile, and what runs goes on."""
        self._is_held = is_held
        self._outstanding.wake()

    def finish(self, reason: str) -> None:
        """The run is over: rollouts still in flight end as cancelled, and the ledger must balance."""
        self._ended_steps.drain()
        self.ledger.end_rest(Outcome.cancelled(reason))
        self.ledger.check()

    @property
    def statistics(self) -> SchedulerStatistics:
        """Where everything is now."""
        return SchedulerStatistics(
            running=self._outstanding.running,
            waiting_groups=len(self._outstanding.ready),
            batches_ahead=len(self._progress.sent),
            in_flight=self.ledger.in_flight,
            admitted=self.ledger.admitted,
            budget_free=self._accounts.budget_free,
            budget_ceiling=self._accounts.budget,
            verdict=self._verdict(),
            waited_s=dict(self._waited_s),
            trainer_waited_s=self._trainer_waits.total_s,
            held_s=self._held.total_s,
            restarted_groups=self._tasks.restarted,
            paused=self._backoff.paused,
            lent_slots=self._lent_slots,
        )

    # --- admission -----------------------------------------------------------------------------------------------

    async def _admit(self, running: asyncio.TaskGroup) -> None:
        """Start groups. Waits for room; unblocked by finished rollouts, sent batches, trained steps, new weights."""
        started = 0
        while not self._is_done():
            self._before_admission()
            verdict = self._verdict()
            key = self._tasks.draw(without=self._failing()) if verdict is Verdict.ADMIT else None
            if key is None:
                if verdict is Verdict.ADMIT:
                    verdict = Verdict.ENOUGH if self._tasks.is_exhausted else Verdict.ENVIRONMENTS_FAIL
                await self._wait_for_room(verdict)
                continue
            started += self._start_group(running, key)
            if started >= STARTED_AT_ONCE:
                started = 0
                await asyncio.sleep(0)

    def _failing(self) -> list[str]:
        """Environments of which nothing may start: they pause, or one group tries them."""
        now_s, waiting, backoff = self._clock(), self._outstanding.waiting, self._backoff
        return [name for name in backoff.paused if waiting[name] or not backoff.may_start(name, now_s=now_s)]

    async def _wait_for_room(self, verdict: Verdict) -> None:
        since = self._clock()
        self._outstanding.admission_wake.clear()
        await self._outstanding.admission_wake.wait()
        self._waited_s[verdict] += self._clock() - since

    def _verdict(self) -> Verdict:
        return Verdict.TRANSPORT_AWAY if self._is_held else may_admit(self._admission_state())

    def _start_group(self, running: asyncio.TaskGroup, key: TaskKey) -> int:
        """Start a task's group; how many rollouts that are."""
        self._groups_started += 1
        group_id = GroupId(f"{self._tasks.task_id(key)}#{self._id_prefix}{self._groups_started}")
        size = self._group_sizes[key.environment]
        rollout_ids = [self._accounts.admit(RolloutId(f"{group_id}.{number}.0")) for number in range(size)]
        group = OpenGroup(
            group_id=group_id,
            key=key,
            members=[Member(rollout_id) for rollout_id in rollout_ids],
            floor=self._progress.serving_version,
            release=EarlyRelease.of_group(self._settings, size),
        )
        self._outstanding.start(group)
        self._backoff.start(key.environment, group_id, rollout_ids)
        group.playing = running.create_task(self._player.play(group), name=group_id)
        return size

    async def _cancel_groups(self, feeding: asyncio.Task[None]) -> None:
        """Cancel what still plays, one group in a turn of the event loop: thousands of rollouts may have to end.

        Waits for their end: a second cancellation would cut short what cleans up after the first. Where one has failed,
        all are cancelled already.
        """
        tasks = [group.playing for group in self._outstanding.groups]
        playing = [task for task in tasks if task is not None and not (task.done() or task.cancelling())]
        if playing:
            feeding.cancel()
            for task in playing:
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.wait({feeding, *playing})

    def _review_running(self) -> None:
        """Stop the running groups that have become too old, under a policy that does."""
        if self._stale.stops_groups:
            for group in self._outstanding.floors.below(self._stale.oldest_allowed(self._progress.trainer_version)):
                if stop := self._stale.stale_action(self._tasks.restarts(group.key)):
                    group.stop_running(stop)

    async def _review_ready(self) -> None:
        """Take out what waits for the trainer and has nothing that it may train on."""
        await in_turns(self._judge.review(self._progress.trainer_version))

    def _release_expiring(self, oldest: int) -> None:
        """Under early release finished rollouts go on while their group's tokens of `oldest` may still bear loss."""
        if self._settings.group_release == "early":
            for group in self._outstanding.floors.below(oldest + 1):
                self._player.expire(group)

    async def _save(self, step: int) -> None:
        """Save where a run resumed after `step` goes on.

        A group of which a part is trained then is not started over, or that part would be trained on twice: the rest of
        it is lost to a resumed run.
        """
        if self._save_state is not None:
            await self._save_state(step, await in_turns(self._tasks.state()))

    @property
    def _slots_left(self) -> int:
        """That rollouts may have, at least one."""
        return max(1, self._max_running - self._lent_slots)

    # --- steps ---------------------------------------------------------------------------------------------------

    async def _end_steps(self) -> None:
        """End the rollouts of large batches. Waits for steps until cancelled."""
        while True:
            await self._ended_steps.end_next()
            self._outstanding.wake()

    def _is_done(self) -> bool:
        is_empty = not (self._outstanding.groups or self._has_dispatched or self._ended_steps)
        return is_empty and self._tasks.is_exhausted
