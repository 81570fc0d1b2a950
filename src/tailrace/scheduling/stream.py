"""The stream scheduler: three loops, each waiting for one thing.

    admission   waits for room (engines, buffer, budget, weights), starts the next task's group
    group       one per task: plays its rollouts, scores them at once, hands what is trainable over
    batches     waits for a batch's worth of groups and for the trainer to be at most one batch behind, sends it

What the trainer does comes back through `handle`, what the generators serve through `weights_installed`; both free
room and wake the loops. Nothing here polls, and no event costs more the more is in flight: sums are kept, not taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Generator, Mapping
from itertools import chain
from typing import Protocol

from tailrace.batching import FormedBatch, compute_advantages, filter_reason
from tailrace.batching.slices import in_turns
from tailrace.records import Group, GroupId, Outcome, PlannedBatch, Rollout, StepSkipped, StepTrained, Task
from tailrace.scheduling.accounts import Accounts
from tailrace.scheduling.admission import AdmissionState, Verdict, may_admit
from tailrace.scheduling.barren import BarrenCount
from tailrace.scheduling.batches import BatchFormer
from tailrace.scheduling.edges import REQUEUED, STRAGGLER, outlived, straggled
from tailrace.scheduling.groups import GroupPlayer, GroupRunner, HoldsGroups, OpenGroup, Place
from tailrace.scheduling.ledger import Ledger
from tailrace.scheduling.observer import SchedulerObserver
from tailrace.scheduling.parts import PartReleaser
from tailrace.scheduling.progress import Progress
from tailrace.scheduling.ready import ReadyGroup, ReadyQueue, shared_out
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import Floors, must_hold, oldest_allowed
from tailrace.scheduling.statistics import SchedulerStatistics
from tailrace.scheduling.steps import EndedSteps
from tailrace.scheduling.stragglers import Stragglers
from tailrace.scheduling.tasks import TaskKey, TaskStream
from tailrace.scheduling.waits import Stopwatch
from tailrace.tracing.phases import phase

MAX_BATCHES_AHEAD = 2
"""Batches sent and not yet trained: one that the trainer works on, one that waits, so that it never idles."""

RESUMED = "resumed"
"""Of a group that was trained in part before the run was resumed: the rest is not started over."""

STARTED_AT_ONCE = 16
"""Rollouts started before the event loop may turn to others."""


class SendBatch(Protocol):
    """Hands a batch over to the trainer."""

    async def __call__(self, batch: PlannedBatch, /) -> None:
        """Return once the batch is accepted.

        Keep nothing of it beyond the end of its step: the scheduler frees its rollouts in slices then, while whoever
        is the last to hold a whole batch frees it at once (16,384 samples: 46 ms in which no other thread runs).
        """
        ...


class SaveState(Protocol):
    """Keeps the scheduler's state: where a run that is resumed after `step` goes on."""

    async def __call__(self, step: int, state: bytes, /) -> None:
        """Return once it is kept. Awaited before the batch of `step` is sent."""
        ...


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
        save_state: SaveState | None = None,
        holder: HoldsGroups | None = None,
    ) -> None:
        """`max_steps` is the trainer's very last step.

        `whole_groups` are environments that can do nothing with a group that lost members. `holder` sets groups aside,
        which `on_straggler = resume_next_step` needs.
        """
        self._stragglers = Stragglers(holder, settings)
        self._tasks, self._send, self._observer = tasks, send, observer
        self._settings = settings
        self._max_staleness, self._max_running, self._max_steps = max_staleness, max_running, max_steps
        self._group_sizes, self._lent_slots = group_sizes, 0
        self._save_state = save_state
        self._progress = Progress()
        self._id_prefix = ""
        self._accounts = Accounts(int((max_staleness + settings.over_sampling) * settings.batch_size), observer)
        self._releaser = PartReleaser(settings, observer, self._push)
        self._player = GroupPlayer(
            runner,
            self._accounts,
            settings,
            whole_groups=whole_groups,
            on_place_ended=self._place_ended,
            on_known=self._releaser.learn,
        )
        self._ended_steps = EndedSteps(self._accounts, observer)
        self._ready = ReadyQueue()
        self._former = BatchFormer(
            self._ready,
            self._accounts,
            settings,
            max_staleness=max_staleness,
            on_taken=self._taken,
            on_trained=lambda ready: tasks.end(ready.opened.key, trained=True),
            on_restart=lambda ready: self._restart(ready.opened),
            on_barren=self._barren,
        )
        self._open: dict[OpenGroup, int] = {}  # started and not wholly in batches: parts that are not
        self._floors = Floors[OpenGroup]()  # of those that run or are scored
        self._again: deque[tuple[TaskKey, int]] = deque()  # stopped tasks, and how often they were restarted
        self._groups_started = self._in_progress = self._running = self._untaken = self._restarted_groups = 0
        self._exhausted = False
        limit = settings.max_barren_batches * settings.batch_size
        self._scored, self._judged = BarrenCount(limit), BarrenCount(limit)
        self._admission_wake, self._batches_wake, self._retire_wake = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._waited_s = dict.fromkeys(Verdict, 0.0)
        clock = asyncio.get_running_loop().time
        self._clock, self._trainer_waits, self._held = clock, Stopwatch(clock), Stopwatch(clock)

    def start(self, *, step: int, version: int, serving_version: int | None, state: bytes = b"") -> None:
        """Begin where training begins: after the trainer's `step`, with weights of `version`.

        `state` is what was saved at that step; empty for a run from the start. `serving_version` is the oldest version
        that a generator serves, to be followed by `weights_installed`; None: each step's weights serve at once.

        Raises `DataError` for a state of other environments.
        """
        if state:
            self._tasks.restore(state)
        self._progress = Progress(step=step, version=version, serving_version=serving_version)
        # Counts of groups begin anew with a run that is resumed: the step makes their names differ from those of the
        # steps that survived.
        self._id_prefix = f"{step}." if step else ""

    @property
    def ledger(self) -> Ledger:
        """Every rollout, from admission to its end."""
        return self._accounts.ledger

    async def run(self) -> None:
        """Schedule until the tasks are exhausted and everything made of them is trained; cancel it to stop earlier.

        Raises `TrainingError` when nothing trainable comes for too long, and what an engine's failure raises.
        """
        self._trainer_waits.set(True)
        self.ledger.count(self._tasks.take_lost_rollouts(), Outcome.cancelled(RESUMED))
        async with asyncio.TaskGroup() as running:
            running.create_task(self._form_batches())
            running.create_task(self._retire())
            await self._admit(running)

    def handle(self, event: StepTrained | StepSkipped) -> None:
        """The trainer is done with the oldest batch sent."""
        formed = self._progress.end_step(event)
        self._trainer_waits.set(not self._progress.sent)
        self._ended_steps.add(event, formed)
        self._retire_wake.set()
        self._review_running()
        self._wake()

    def weights_installed(self, version: int) -> None:
        """No generator serves anything older than `version` from now on."""
        self._progress.install(version)
        self._wake()

    def weights_not_installed(self, version: int) -> None:
        """Nobody waits for `version` any more: it could not be installed, and the old weights go on serving."""
        self._progress.expect_no(version)
        self._wake()

    def lend(self, slots: int) -> None:
        """From now on leave so many of the engines' slots to somebody else; what runs in them goes on to its end."""
        self._lent_slots = slots
        self._wake()

    def finish(self, reason: str) -> None:
        """The run is over: whatever is still in flight is cancelled, and the ledger must balance."""
        self._ended_steps.drain()
        for rollout_id in self.ledger.in_flight_ids():
            self.ledger.end(rollout_id, Outcome.cancelled(reason))
        self.ledger.check()

    @property
    def statistics(self) -> SchedulerStatistics:
        """Where everything is now."""
        return SchedulerStatistics(
            running=self._running,
            waiting_groups=len(self._ready),
            batches_ahead=len(self._progress.sent),
            in_flight=self.ledger.in_flight,
            admitted=self.ledger.admitted,
            budget_free=self._accounts.budget.free,
            budget_ceiling=self._accounts.budget.ceiling,
            verdict=self._verdict(),
            waited_s=dict(self._waited_s),
            trainer_waited_s=self._trainer_waits.total_s,
            held_s=self._held.total_s,
            restarted_groups=self._restarted_groups,
            set_aside=self._stragglers.rollouts,
        )

    # --- admission -----------------------------------------------------------------------------------------------

    async def _admit(self, running: asyncio.TaskGroup) -> None:
        """Start groups. Waits for room; unblocked by finished rollouts, sent batches, trained steps, new weights."""
        started = 0
        while not self._is_done():
            if self._stragglers and self._progress.is_even:
                self._running += self._stragglers.resume()
            verdict = self._verdict()
            if verdict is not Verdict.ADMIT:
                await self._wait_for_room(verdict)
                continue
            if not self._again and (key := self._tasks.draw()) is not None:
                self._again.append((key, 0))
            self._exhausted = not self._again
            if self._exhausted:
                self._wake()
                if not self._is_done():
                    await self._wait_for_room(Verdict.ENOUGH)
                continue
            started += self._start_group(running, *self._again.popleft())
            if started >= STARTED_AT_ONCE:
                started = 0
                await asyncio.sleep(0)

    async def _wait_for_room(self, verdict: Verdict) -> None:
        since = self._clock()
        self._admission_wake.clear()
        await self._admission_wake.wait()
        self._waited_s[verdict] += self._clock() - since

    def _verdict(self) -> Verdict:
        settings, progress = self._settings, self._progress
        steps_left = None if self._max_steps is None else self._max_steps - progress.step - progress.ahead
        fitting = (self._max_staleness + 1 - progress.age) * settings.batch_size
        # with no batch ahead what is ready waits for no trainer but for the rest of its batch, however long that runs
        buffered_batches = settings.buffer_batches if progress.ahead else max(1.0, settings.buffer_batches)
        return may_admit(
            AdmissionState(
                running=self._running,
                max_running=self._max_running - self._lent_slots,
                waiting_for_trainer=self._ready.rollouts + progress.waiting_rollouts,
                max_waiting=int(buffered_batches * settings.batch_size),
                is_trainer_fed=progress.ahead > 0,
                budget_free=self._accounts.budget.free,
                untaken=self._untaken,
                wanted=None if steps_left is None else steps_left * settings.batch_size,
                step_size=int(settings.over_sampling * settings.batch_size) if settings.over_sampling > 1 else None,
                age=progress.age,
                max_age=0 if self._stragglers.are_held else self._max_staleness,
                fitting=fitting if settings.on_stale == "wait" else None,
            )
        )

    def _start_group(self, running: asyncio.TaskGroup, key: TaskKey, restarts: int) -> int:
        """Start a task's group; how many rollouts that are."""
        self._groups_started += 1
        group_id = GroupId(f"{self._tasks.task_id(key)}#{self._id_prefix}{self._groups_started}")
        places = [Place(f"{group_id}.{place}") for place in range(self._group_sizes[key.environment])]
        group = OpenGroup(group_id, key, places, self._progress.serving_version, restarts)
        self._releaser.begin(group)
        self._accounts.budget.acquire(place.name for place in places)
        self._open[group] = 1
        self._floors.add(group, group.floor)
        self._in_progress += 1
        self._running += group.size
        self._untaken += group.size
        running.create_task(self._play(group), name=group_id)
        return group.size

    # --- one group -----------------------------------------------------------------------------------------------

    async def _play(self, group: OpenGroup) -> None:
        """Waits for the group's task, its own rollouts and its own scoring, no more."""
        task = await self._tasks.make(group.key)
        rollouts = await self._player.play(group, task)
        if group.release is not None:
            self._releaser.close(group, task, rollouts, self._player)
        elif group.given_up is None:
            scored = await self._score(group, task, rollouts)
            sizes = shared_out(group.size, [len(one.rollouts) for one in scored])
            for one, size in zip(scored, sizes, strict=True):
                self._push(group, one, size)
        group.is_over = True
        self._in_progress -= 1
        self._floors.remove(group, group.floor)
        self._untaken -= group.size - group.released
        self._close_part(group)
        if group.released:
            self._scored.fruitful()
        else:
            self._close_barren(group)
        self._wake()

    def _push(self, group: OpenGroup, part: Group, size: int) -> None:
        """A part of a group, or all of it, waits for its batch; it counts for `size` rollouts."""
        self._open[group] += 1
        group.released += size
        self._ready.push(ReadyGroup(part, group, size))
        self._wake()

    def _close_part(self, group: OpenGroup) -> None:
        """A part of it was taken, or nothing more will come of it."""
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]

    async def _score(self, group: OpenGroup, task: Task, rollouts: list[Rollout]) -> list[Group]:
        """Its groups that are worth training on."""
        scored = await self._player.score(Group(group.group_id, task, rollouts), group.size)
        return [one for one in scored if self._is_trainable(one)]

    def _is_trainable(self, group: Group) -> bool:
        with phase("advantages"):
            compute_advantages(group, self._settings.advantage)
            reason = filter_reason(group, filter_zero_spread=self._settings.filter_zero_spread)
        self._observer.group_scored(group, reason)
        if reason is not None:
            self._accounts.end(group.rollouts, Outcome.filtered(reason))
        return reason is None

    def _close_barren(self, group: OpenGroup) -> None:
        """Nothing of it will be trained on; its slots are free already."""
        if group.given_up is None or group.given_up.reason not in (REQUEUED, STRAGGLER):
            self._scored.barren(group.size, self.ledger)
        if group.given_up is not None and group.given_up.again:
            self._restart(group)
        else:
            self._tasks.end(group.key, trained=False)

    def _restart(self, group: OpenGroup) -> None:
        """Its task is the next one to start."""
        self._restarted_groups += 1
        self._again.append((group.key, group.restarts + 1))

    def _place_ended(self, group: OpenGroup) -> None:
        self._running -= not group.is_held
        self._wake()

    def _review_running(self) -> None:
        """Groups that run and have become too old are stopped, where the settings say so."""
        if self._settings.on_stale in ("restart", "drop"):
            for group in self._floors.below(oldest_allowed(self._progress.judged_version, self._max_staleness)):
                if given_up := outlived(self._settings, group.restarts):
                    group.give_up(given_up)

    # --- batches -------------------------------------------------------------------------------------------------

    async def _form_batches(self) -> None:
        """Send batches. Waits for groups and for the trainer; unblocked by both, and by the end of the tasks."""
        while not self._is_done():
            if not self._may_form():
                await self._batches_wake.wait()
                self._batches_wake.clear()
                continue
            if formed := await self._form_batch():
                await self._send_batch(formed)
                await self._pass_edge()
            del formed  # it lives as long as its step
            self._progress.is_forming = False
            self._review_running()
            self._wake()

    async def _form_batch(self) -> FormedBatch | None:
        progress = self._progress
        step, judged_version = progress.step + progress.ahead + 1, progress.judged_version
        self._release_expiring(oldest_allowed(judged_version, self._max_staleness))
        progress.is_forming = True
        with phase("form_batch", track="batches", about={"step": step}):
            forming = self._former.form(step=step, judged_version=judged_version)
            return await in_turns(forming)

    async def _send_batch(self, formed: FormedBatch) -> None:
        self._progress.sent.append(formed)
        self._progress.is_forming = False
        self._judged.fruitful()
        self._trainer_waits.set(False)
        summary = formed.batch.summary
        if self._save_state is not None:
            await self._save_state(summary.step, await in_turns(self._state()))
        with phase("send_batch", track="batches", num_bytes=formed.batch.num_bytes, about={"step": summary.step}):
            await self._send(formed.batch)
        self._observer.batch_sent(formed)

    def _may_form(self) -> bool:
        if len(self._progress.sent) >= MAX_BATCHES_AHEAD or not self._ready:
            return False
        if self._ready.size >= self._settings.batch_size:
            is_held = self._settings.on_stale == "wait" and must_hold(
                self._floors.oldest, judged_version=self._progress.judged_version, max_staleness=self._max_staleness
            )
            self._held.set(is_held)
            return not is_held
        if self._in_progress or self._progress.sent:
            return False
        nothing_left = self._exhausted and not self._again
        return nothing_left or self._verdict() not in (Verdict.ADMIT, Verdict.WEIGHTS_OLD)

    def _release_expiring(self, oldest: int) -> None:
        """Under early release what is known of a group goes into the last batch that takes `oldest`, its first tokens.

        The batch takes the oldest first, so what waits with younger tokens stays behind for the next one.
        """
        if self._settings.group_release == "early":
            for group in self._floors.below(oldest + 1):
                self._releaser.expire(group)

    def _taken(self, ready: ReadyGroup) -> None:
        """A part of a group went into a batch."""
        self._untaken -= ready.size
        ready.opened.taken += ready.size
        self._close_part(ready.opened)

    def _barren(self, ready: ReadyGroup) -> None:
        """A part of a group was taken for a batch, and nothing of it bears loss."""
        self._tasks.end(ready.opened.key, trained=False)
        self._judged.barren(ready.size, self.ledger)

    def _state(self) -> Generator[None, None, bytes]:
        """Where a run resumed after the newest batch formed goes on; in slices, of what is outstanding now.

        A group of which a part is in a batch is not started over, or that part would be trained on twice: what is left
        of it is lost to a run that is resumed, and counted. None is taken between two slices: only batches take.
        """
        groups, again = list(self._open), [key for key, _ in self._again]
        running = (group.key for group in groups if not group.taken)
        lost = sum(group.left for group in groups if group.taken)
        return (yield from self._tasks.state_in_slices(chain(running, again), lost_rollouts=lost))

    # --- the edge of a step, under over-sampling -----------------------------------------------------------------

    async def _pass_edge(self) -> None:
        """A batch was formed. Waits until what stops has stopped."""
        if (given_up := straggled(self._settings)) is not None:
            for group in self._open:
                group.give_up(given_up)
        elif self._stragglers.are_held:
            stopped = self._stragglers.set_aside(self._open)
            self._running -= sum(group.unfinished for group in stopped)
            await self._stragglers.hold(stopped)

    # --- steps ---------------------------------------------------------------------------------------------------

    async def _retire(self) -> None:
        """Writes down the ends of large batches' rollouts. Waits for steps; ends with the last one."""
        while not self._is_done():
            if not self._ended_steps:
                await self._retire_wake.wait()
                self._retire_wake.clear()
                continue
            await self._ended_steps.end_next()
            self._wake()

    def _is_done(self) -> bool:
        coming = self._open or self._again or self._ready or self._progress.ahead
        return self._exhausted and not (coming or self._ended_steps)

    def _wake(self) -> None:
        self._admission_wake.set()
        self._batches_wake.set()
        if self._is_done():
            self._retire_wake.set()
