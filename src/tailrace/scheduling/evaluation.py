"""Measure a policy on held-out tasks, each run once: alone, or beside training.

    every n steps ─► the newest step that is due ─► its weights are installed ─► tasks, in its slots ─► result

Beside training an evaluation has slots of its own, which admission leaves free; nothing is paused. New weights arrive
meanwhile, so a result says which versions sampled it. One evaluation runs at a time; of those that fall due meanwhile
only the newest is made. Nothing of it enters the ledger or the staleness budget. As in training, a task that fails is
tried again where that may help, and an environment that fails on and on pauses: then one task of it tries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.errors import RequestRefused, RolloutError, WorkerLost
from tailrace.records import Group, GroupId, Rollout, RolloutId, Task
from tailrace.scheduling.backoff import Backoff
from tailrace.scheduling.groups import UNSCORED, GroupRunner
from tailrace.scheduling.settings import EvaluationSettings, SchedulingSettings
from tailrace.timeouts import timeout


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationResult:
    """One environment's rollouts in task order, and how many were lost or kept without a reward, by reason."""

    rollouts: list[Rollout]
    failed: dict[str, int]
    failure: str = ""
    """What the newest of those that were lost failed by, in a line."""

    @property
    def num_lost(self) -> int:
        """Rollouts that failed for good."""
        return sum(self.failed.values()) - self.failed.get(UNSCORED, 0)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were scored."""
        return [rollout.reward.value for rollout in self.rollouts if rollout.reward is not None]

    @property
    def mean_reward(self) -> float:
        """Mean reward; a lost rollout is left out, never counted as 0. NaN when all were lost."""
        return statistics.fmean(self.rewards) if self.rewards else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean reward; NaN below two rollouts."""
        rewards = self.rewards
        return statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan

    @property
    def policy_versions(self) -> tuple[int, int] | None:
        """Lowest and highest version that sampled a token of it; None without a token."""
        branches = [branch for rollout in self.rollouts for branch in rollout.branches]
        sampled = [branch.policy_versions[branch.loss_mask] for branch in branches]
        versions = np.concatenate(sampled) if sampled else np.empty(0, np.int32)
        return (int(versions.min()), int(versions.max())) if versions.size else None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The result of one evaluation beside training."""

    step: int
    """The step that it fell due at; no token is of older weights than that step's."""
    results: dict[str, EvaluationResult]
    """By environment."""
    duration_s: float
    coalesced: int = 0
    """Evaluations skipped since the run began, as a newer one fell due before they could begin."""


@dataclass(slots=True)
class _Tally:
    """One environment's rollouts, so far."""

    finished: dict[int, Rollout] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    failure: str = ""

    def lose(self, error: RolloutError | RequestRefused) -> None:
        self.failed[error.reason] += 1
        self.failure = str(error).partition("\n")[0]

    def result(self) -> EvaluationResult:
        finished = [self.finished[number] for number in sorted(self.finished)]
        return EvaluationResult(finished, dict(self.failed), self.failure)


class _Walk:
    """One evaluation: every task once, a limited number at a time."""

    def __init__(
        self,
        tasks: Iterable[Task],
        runner: GroupRunner,
        scheduling: SchedulingSettings,
        name: str,
        on_ended: Callable[[], None] | None = None,
    ) -> None:
        self._tasks, self._runner, self._name, self._on_ended = tasks, runner, name, on_ended
        self._max_retries, self._max_failing_s = scheduling.max_retries, scheduling.max_failing_s
        self._backoff, self._now_s = Backoff(), asyncio.get_running_loop().time
        self._is_patient = True
        self._resumes = asyncio.Event()
        """Set when an environment may work again, or another rollout may try it."""
        self._tallies: dict[str, _Tally] = {}
        self._slots, self._concurrency = asyncio.Semaphore(0), 0
        self.ended = 0
        """Rollouts finished or lost."""

    async def run(self, concurrency: int) -> dict[str, EvaluationResult]:
        self.widen(concurrency)
        async with asyncio.TaskGroup() as running:
            for number, task in enumerate(self._tasks):
                await self._slots.acquire()
                running.create_task(self._measure(task, number))
        return {environment: tally.result() for environment, tally in self._tallies.items()}

    def widen(self, concurrency: int) -> None:
        """Run at least `concurrency` tasks at a time from now on."""
        for _ in range(self._concurrency, concurrency):
            self._slots.release()
        self._concurrency = max(self._concurrency, concurrency)

    def hurry(self) -> None:
        """Nothing is tried again from now on, and no outage waited for: the rest may have little time."""
        self._is_patient, self._max_retries = False, 0
        self._resumes.set()

    async def _measure(self, task: Task, number: int) -> None:
        tally = self._tallies.setdefault(task.environment, _Tally())
        try:
            tally.finished[number] = rollout = await self._run_one(task, number)
            if rollout.reward is None:
                tally.failed[UNSCORED] += 1
        except (RolloutError, RequestRefused) as error:
            tally.lose(error)
        self.ended += 1
        if self._on_ended is not None:
            self._on_ended()
        self._slots.release()

    async def _run_one(self, task: Task, number: int) -> Rollout:
        """The first attempt that succeeds, or the error of the last: after `max_retries` more where it may pass.

        What others ended, and what failed in an outage that is waited for, is no failure of the task.
        """
        group_id = GroupId(f"{self._name}/{task.task_id}#{number}")
        attempts, failures = itertools.count(), 0
        while True:
            await self._until_it_may_try(task.environment, group_id)
            try:
                rollout = await self._attempt(task, group_id, next(attempts))
            except RolloutError as error:
                if error.is_blameless:
                    continue
                if not error.may_pass or error.is_mistake:
                    raise
                is_of_outage = self._is_of_an_outage(task.environment, error)
                # a task that costs its worker, too: it would try for all others for ever
                failures += isinstance(error, WorkerLost) or not is_of_outage
                if failures > self._max_retries:
                    raise
            else:
                if self._backoff.came_back(task.environment, "rollouts", now_s=self._now_s()):
                    self._resumes.set()
                return rollout

    async def _attempt(self, task: Task, group_id: GroupId, attempt: int) -> Rollout:
        rollout_id = RolloutId(f"{group_id}.{attempt}")
        self._backoff.try_again(task.environment, group_id, rollout_id)
        try:
            rollout = await self._runner.run(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)
            if rollout.reward is None:  # else what scores groups, which compares rollouts, has nothing to say of one
                await self._runner.score(Group(group_id=group_id, task=task, rollouts=[rollout]))
        except (RolloutError, RequestRefused):
            if self._backoff.attempt_failed(task.environment, rollout_id):
                self._resumes.set()
            raise
        return rollout

    async def _until_it_may_try(self, environment: str, group_id: GroupId) -> None:
        """Waits while the environment pauses, and then while another rollout tries whether it works again.

        Others have the slot meanwhile. Not where it has been away for too long.
        """
        while not self._may_try(environment, group_id):
            pause_s = self._backoff.pause_left_s(environment, now_s=self._now_s())
            self._slots.release()
            self._resumes.clear()
            with contextlib.suppress(TimeoutError):
                async with timeout(min(pause_s or math.inf, self._patience_s(environment))):
                    await self._resumes.wait()
            await self._slots.acquire()

    def _may_try(self, environment: str, group_id: GroupId) -> bool:
        is_waited_for = self._is_waited_for(environment)
        return not is_waited_for or self._backoff.may_try(environment, group_id, now_s=self._now_s())

    def _is_of_an_outage(self, environment: str, error: RolloutError) -> bool:
        """Whether an attempt failed by an outage that is waited for. A lost worker begins none."""
        if not isinstance(error, WorkerLost):
            self._backoff.failed(environment, "rollouts", now_s=self._now_s())
        return self._is_waited_for(environment)

    def _is_waited_for(self, environment: str) -> bool:
        return self._patience_s(environment) > 0

    def _patience_s(self, environment: str) -> float:
        """Seconds for which its outage is still waited for; 0 where it has none."""
        lasted_s = self._backoff.outages_s(now_s=self._now_s()).get(environment, math.inf)
        return max(0.0, self._max_failing_s - lasted_s) if self._is_patient else 0.0


async def evaluate(
    tasks: Iterable[Task],
    runner: GroupRunner,
    scheduling: SchedulingSettings,
    *,
    concurrency: int,
    on_ended: Callable[[], None] | None = None,
) -> dict[str, EvaluationResult]:
    """Run every task once, at most `concurrency` at a time; the results by environment.

    `scheduling` says how often one that failed is tried again, and how long an outage is waited for. `on_ended` is
    called for each rollout that finished or was lost for good.
    """
    return await _Walk(tasks, runner, scheduling, "eval", on_ended).run(concurrency)


class Evaluator:
    """Evaluates beside training, one evaluation at a time; `run` it in a task of its own."""

    def __init__(
        self,
        tasks: Sequence[Task],
        runner: GroupRunner,
        on_result: Callable[[Evaluation], None],
        *,
        settings: EvaluationSettings,
        scheduling: SchedulingSettings,
        max_running: int,
        lend: Callable[[int], None],
    ) -> None:
        """`lend` is called with the number of slots that admission leaves free."""
        self._tasks, self._runner, self._on_result, self._scheduling = tasks, runner, on_result, scheduling
        self._settings, self._max_running, self._slots = settings, max_running, settings.slots(max_running)
        self._lend = lend
        self._due: tuple[int, int] | None = None
        self._newest_step = -1
        """Of the newest evaluation that fell due."""
        self.step: int | None = None
        """Of the evaluation that runs, or waits for its weights; None while there is none."""
        self._walk: _Walk | None = None
        self._is_last = False
        """Training is over."""
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._coalesced = 0

    def begin(self, step: int, version: int, *, evaluated: int | None) -> None:
        """Training begins after `step`; `evaluated` is the step of the newest evaluation that earlier starts made.

        One that fell due since, and of which they made nothing, falls due now.
        """
        if evaluated is not None:
            self._newest_step = max(evaluated, self._newest_step)
        self.step_ended(step, version)

    def step_ended(self, step: int, version: int) -> None:
        """A step ended, with weights of this version: an evaluation may fall due."""
        every_steps = self._settings.every_steps
        if every_steps is None or step - step % every_steps <= self._newest_step:
            return
        self._coalesced += self._due is not None
        self._due, self._newest_step = (step, version), step
        self._idle.clear()
        self._wake.set()

    def resize(self, max_running: int) -> None:
        """Engines have this number of slots from now on; an evaluation that runs keeps those it has."""
        self._max_running = max(1, max_running)
        self._slots = self._settings.slots(self._max_running)

    @property
    def is_idle(self) -> bool:
        """Whether none is due and none runs."""
        return self._idle.is_set()

    def describe(self) -> str:
        """What runs or is due, for people."""
        steps = [step for step in (self.step, self._due[0] if self._due else None) if step is not None]
        return ", ".join(f"step {step}" for step in steps)

    @property
    def ended(self) -> int:
        """Rollouts of the running evaluation that finished or were lost."""
        return self._walk.ended if self._walk else 0

    async def run(self, installed: Callable[[int], Awaitable[bool]]) -> None:
        """Evaluate what falls due until cancelled; `installed` waits until weights of a version, or newer ones, serve.

        Where it returns False they never will, and that evaluation is left out.

        Raises the error of an engine that failed.
        """
        while True:
            while self._due is None:
                self._wake.clear()
                await self._wake.wait()
            (self.step, version), self._due = self._due, None
            if await installed(version):
                await self._evaluate(self.step)
            self.step = None
            if self._due is None:
                self._idle.set()

    async def finish(self) -> None:
        """Training is over: wait up to `finish_s` for what is due or runs, now in all slots."""
        self._slots, self._is_last = self._max_running, True
        if self._walk is not None:
            self._walk.widen(self._slots)
            self._walk.hurry()
        with contextlib.suppress(TimeoutError):
            async with timeout(self._settings.finish_s):
                await self._idle.wait()

    async def _evaluate(self, step: int) -> None:
        clock = asyncio.get_running_loop().time
        since = clock()
        self._walk = walk = _Walk(self._tasks, self._runner, self._scheduling, f"eval-{step}")
        if self._is_last:
            walk.hurry()
        self._lend(self._slots)
        try:
            results = await walk.run(self._slots)
        finally:
            self._lend(0)
            self._walk = None
        self._on_result(Evaluation(step, results, clock() - since, self._coalesced))
