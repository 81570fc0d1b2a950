"""The stream scheduler: three loops, each waiting for one thing.

    admission   waits for room (engines, buffer, budget, weights), starts the next task's group
    batches     waits for a batch's worth of groups and for the trainer to be at most one batch behind, sends it
    ends        waits for the trainer's steps, gives their rollouts their terminal state

Each group runs in a task of its own (see `groups`). `handle` takes the trainer's events, `weights_installed` the
generators' versions; both wake the loops. Nothing polls, and the cost of an event does not grow with what is in flight:
sums are running sums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeAlias

from tailrace.batching import FormedBatch
from tailrace.batching.slices import in_turns
from tailrace.records import GroupId, Outcome, PlannedBatch, RolloutId, StepSkipped, StepTrained
from tailrace.scheduling.admission import AdmissionState, Verdict, may_admit
from tailrace.scheduling.backoff import Backoff
from tailrace.scheduling.batches import BatchFormer
from tailrace.scheduling.groups import GroupPlayer, GroupRunner
from tailrace.scheduling.ledger import Accounts, Ledger, UntrainableStreak
from tailrace.scheduling.observer import SchedulerObserver, SchedulerStatistics, Stopwatch
from tailrace.scheduling.outstanding import Member, OpenGroup, Outstanding
from tailrace.scheduling.progress import EndedSteps, Progress
from tailrace.scheduling.release import EarlyRelease
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import stale_policy
from tailrace.scheduling.stragglers import HoldsGroups, Stragglers
from tailrace.scheduling.tasks import TaskKey, TaskStream
from tailrace.tracing.phases import phase

MAX_BATCHES_AHEAD = 2
"""Batches sent and not yet trained: one that is trained on and one that waits, so that the trainer never idles."""

STARTED_AT_ONCE = 16
"""Rollouts started in one turn of the event loop."""


SendBatch: TypeAlias = Callable[[PlannedBatch], Awaitable[None]]
"""Hands a batch over to the trainer; returns once it is accepted.

Must keep nothing of the batch beyond the end of its step: the scheduler frees its rollouts in slices then, while the
last owner of a whole batch frees it at once (16,384 samples: 46 ms in which no other thread runs).
"""

SaveState: TypeAlias = Callable[[int, bytes], Awaitable[None]]
"""Keeps (step, state): where a run resumed after that step goes on. Awaited before the batch of the step is sent."""


class StreamScheduler:
    """Keeps the engines full within the staleness budget, and the trainer fed with the oldest first.

    Make it, `start` it where training starts, `run` it.
    """

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
        whole_groups: Collection[str] = (),
        max_steps: int | None = None,
        num_ranks: int = 1,
        save_state: SaveState | None = None,
        holder: HoldsGroups | None = None,
    ) -> None:
        """`max_steps` is the trainer's last step, `num_ranks` are its ranks, to which rows are dealt.

        `whole_groups` are environments that need every member of a group.

        `holder` sets groups aside, which `on_straggler = resume_next_step` needs.
        """
        self._tasks, self._send, self._observer = tasks, send, observer
        self._settings, self._max_running, self._max_steps = settings, max_running, max_steps
        self._group_sizes, self._lent_slots, self._save_state = group_sizes, 0, save_state
        self._stale = stale_policy(settings, max_staleness)
        self._accounts = Accounts(settings.staleness_budget(max_staleness), observer)
        self._outstanding = outstanding = Outstanding()
        self._progress = Progress()
        self._stragglers = Stragglers(outstanding, holder, settings)
        self._backoff = Backoff()
        untrainable = UntrainableStreak(
            settings.max_barren_batches * settings.batch_size,
            self.ledger,
            reward_range=tasks.reward_range,
            max_failing_s=settings.max_failing_s,
        )
        self._player = GroupPlayer(
            *(runner, tasks, outstanding, self._accounts, settings),
            backoff=self._backoff,
            untrainable=untrainable,
            whole_groups=whole_groups,
        )
        self._former = BatchFormer(
            *(tasks, outstanding, self._accounts, self._stale, settings), untrainable=untrainable, num_ranks=num_ranks
        )
        self._ended_steps = EndedSteps(self._accounts)
        self._id_prefix = ""
        self._groups_started = 0
        self._waited_s = dict.fromkeys(Verdict, 0.0)
        clock = asyncio.get_running_loop().time
        self._clock, self._trainer_waits, self._held = clock, Stopwatch(clock), Stopwatch(clock)

    def start(
        self, *, step: int, version: int, serving_version: int | None, state: bytes = b"", resumes: int = 0
    ) -> None:
        """Begin where training begins: after the trainer's `step`, with weights of `version`.

        `state` is what was saved at that step; empty for a run from the start. `serving_version` is the oldest version
        that a generator serves, to be followed by `weights_installed`; None: each step's weights serve at once.
        `resumes` is how often the run was started before: no name that those starts gave is given again.

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
            running.create_task(self._form_batches())
            ending = running.create_task(self._end_steps())
            await self._admit(running)
            ending.cancel()

    def handle(self, event: StepTrained | StepSkipped) -> None:
        """The trainer is done with the oldest batch sent."""
        formed = self._progress.end_step(event)
        self._trainer_waits.set(not self._progress.sent)
        self._ended_steps.add(event, formed)
        self._review_running()
        self._outstanding.wake()

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

    def finish(self, reason: str) -> None:
        """The run is over: rollouts still in flight end as cancelled, and the ledger must balance."""
        self._ended_steps.drain()
        for rollout_id in self.ledger.in_flight_ids():
            self.ledger.end(rollout_id, Outcome.cancelled(reason))
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
            set_aside=self._stragglers.rollouts,
        )

    # --- admission -----------------------------------------------------------------------------------------------

    async def _admit(self, running: asyncio.TaskGroup) -> None:
        """Start groups. Waits for room; unblocked by finished rollouts, sent batches, trained steps, new weights."""
        started = 0
        while not self._is_done():
            if self._stragglers.are_held and self._progress.is_even:
                self._stragglers.resume()
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
        if not (paused := self._backoff.paused):
            return []
        now_s, tried = self._clock(), {group.key.environment for group in self._outstanding.groups if not group.is_over}
        return [name for name in paused if name in tried or self._backoff.pause_left_s(name, now_s=now_s)]

    async def _wait_for_room(self, verdict: Verdict) -> None:
        since = self._clock()
        self._outstanding.admission_wake.clear()
        await self._outstanding.admission_wake.wait()
        self._waited_s[verdict] += self._clock() - since

    def _verdict(self) -> Verdict:
        settings, progress, outstanding = self._settings, self._progress, self._outstanding
        steps_left = None if self._max_steps is None else self._max_steps - progress.step - progress.ahead
        # with no batch ahead what is ready waits for no trainer but for the rest of its batch, however long that runs
        buffered_batches = settings.buffer_batches if progress.ahead else max(1.0, settings.buffer_batches)
        return may_admit(
            AdmissionState(
                running=outstanding.running,
                max_running=self._max_running - self._lent_slots,
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
        )

    def _start_group(self, running: asyncio.TaskGroup, key: TaskKey) -> int:
        """Start a task's group; how many rollouts that are."""
        self._groups_started += 1
        group_id = GroupId(f"{self._tasks.task_id(key)}#{self._id_prefix}{self._groups_started}")
        size = self._group_sizes[key.environment]
        group = OpenGroup(
            group_id=group_id,
            key=key,
            members=[Member(self._accounts.admit(RolloutId(f"{group_id}.{number}.0"))) for number in range(size)],
            floor=self._progress.serving_version,
            release=EarlyRelease.of_group(self._settings, size),
        )
        self._outstanding.start(group)
        running.create_task(self._player.play(group), name=group_id)
        return size

    def _review_running(self) -> None:
        """Stop the running groups that have become too old, under a policy that does."""
        if self._stale.stops_groups:
            for group in self._outstanding.floors.below(self._stale.oldest_allowed(self._progress.trainer_version)):
                if stop := self._stale.stale_action(self._tasks.restarts(group.key)):
                    group.stop_running(stop)

    # --- batches -------------------------------------------------------------------------------------------------

    async def _form_batches(self) -> None:
        """Send batches. Waits for groups and for the trainer; unblocked by both, and by the end of the tasks."""
        while not self._is_done():
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
        if outstanding.floors.oldest is not None or progress.sent:
            return False
        return self._tasks.is_exhausted or self._verdict() not in (Verdict.ADMIT, Verdict.WEIGHTS_OLD)

    async def _form_batch(self) -> FormedBatch | None:
        progress = self._progress
        step, trainer_version = progress.step + progress.ahead + 1, progress.trainer_version
        self._release_expiring(self._stale.oldest_allowed(trainer_version))
        progress.is_forming = True
        with phase("form_batch", track="batches", about={"step": step}):
            return await in_turns(self._former.form(step=step, trainer_version=trainer_version))

    def _release_expiring(self, oldest: int) -> None:
        """Under early release finished rollouts go into the last batch that takes their group's tokens of `oldest`."""
        if self._settings.group_release == "early":
            for group in self._outstanding.floors.below(oldest + 1):
                self._player.expire(group)

    async def _send_batch(self, formed: FormedBatch) -> None:
        summary = formed.batch.summary
        self._progress.sent.append(formed)
        self._progress.is_forming = False
        self._trainer_waits.set(False)
        await self._save(summary.step)
        with phase("send_batch", track="batches", num_bytes=formed.batch.num_bytes, about={"step": summary.step}):
            await self._send(formed.batch)
        self._observer.batch_sent(formed)

    async def _save(self, step: int) -> None:
        """Save where a run resumed after `step` goes on, now that its batch is formed.

        A group of which a part is in a batch is not started over, or that part would be trained on twice: the rest of
        it is lost to a resumed run.
        """
        if self._save_state is not None:
            await self._save_state(step, await in_turns(self._tasks.state()))

    # --- steps ---------------------------------------------------------------------------------------------------

    async def _end_steps(self) -> None:
        """End the rollouts of large batches. Waits for steps until cancelled."""
        while True:
            await self._ended_steps.end_next()
            self._outstanding.wake()

    def _is_done(self) -> bool:
        is_empty = not (self._outstanding.groups or self._progress.ahead or self._ended_steps)
        return is_empty and self._tasks.is_exhausted
