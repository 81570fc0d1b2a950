"""Groups without a run or a trainer: play every task a number of times, score each group as soon as it is complete.

    tasks ──► group_size × play(rollout) ──► reward(rollout) ──► score_group(group) ──► stream_groups, gather_groups

Scoring and failures are `scoring.Scorer`, as in a training run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from tailrace.environments import AgentResult, ScoreGroup
from tailrace.environments.results import as_agent_result
from tailrace.errors import ErrorBudgetSpent
from tailrace.records import Group, GroupId, Json, Reward, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts.attribution import leaves_of
from tailrace.rollouts.error_budget import RAISE, ErrorBudget, ErrorTally
from tailrace.rollouts.gathering.progress import GroupBars, GroupCounts
from tailrace.rollouts.scoring import Scorer

if TYPE_CHECKING:
    from rich.console import Console

Play: TypeAlias = Callable[[Rollout], Awaitable[AgentResult | Reward | float | None]]
"""One attempt at `rollout.task`: fills the rollout, and returns its reward, or None where something else scores it."""
RolloutReward: TypeAlias = Callable[[Rollout], Awaitable[AgentResult | Reward | float]]
"""Scores one rollout that has ended, in place of what `play` returned."""

_SAMPLING = SamplingParams()
ParamsT = ParamSpec("ParamsT")


async def stream_groups(
    play: Play,
    tasks: Iterable[Task | Mapping[str, Json]],
    *,
    group_size: int = 8,
    reward: RolloutReward | None = None,
    score_group: ScoreGroup | None = None,
    rollout_concurrency: int | None = None,
    score_concurrency: int | None = None,
    rollout_errors: ErrorBudget = RAISE,
    score_errors: ErrorBudget = RAISE,
    progress: bool | Console = False,
    counts: GroupCounts | None = None,
) -> AsyncGenerator[Group, None]:
    """Scored groups as they come. Leave early through `contextlib.aclosing`, which ends all that still runs.

    Args:
        play: One attempt at a task; called `group_size` times per task, each with a `Rollout` of its own to fill.
        tasks: `Task`s, or their rows.
        group_size: Rollouts of one task.
        reward: Scores a rollout when it ends; None: what `play` returns is its reward.
        score_group: Rescores, splits or (None) discards a group when its last rollout ended and was scored.
        rollout_concurrency: Rollouts played at once at most; None: all. Tasks are drawn one ahead.
        score_concurrency: Calls of `score_group` at once at most; None or 0: as many as there are.
        rollout_errors: How many rollouts may fail. One that failed is always dropped.
        score_errors: How many rewards and groups may fail to be scored, and whether those are kept.
        progress: Show two progress bars, on this console if it is one.
        counts: Filled while it runs: what was dropped, failed or kept unscored.

    Raises:
        ErrorBudgetSpent: More failed than an error budget allows; an `ExceptionGroup` of what failed.
        ExceptionGroup: An engine is gone or a setting is impossible, which no error budget covers.

    Every task that it started has ended when it ends, also by a cancellation.
    """
    counts = counts if counts is not None else GroupCounts()
    gathering = _Gathering(
        play=play,
        reward=reward,
        score_group=score_group,
        group_size=group_size,
        concurrency=rollout_concurrency,
        attempts=ErrorTally(rollout_errors, "rollouts", "rollout_errors"),
        scorer=Scorer(concurrency=score_concurrency, errors=score_errors),
        counts=counts,
    )
    total = len(tasks) if isinstance(tasks, Sized) else None
    with ExitStack() as stack:
        if progress is not False:
            console = None if progress is True else progress
            stack.enter_context(GroupBars(counts, groups=total, group_size=group_size, console=console))
        working = asyncio.create_task(gathering.run(tasks))
        try:
            while (group := await gathering.next()) is not None:
                yield group
        finally:
            await _ended(working)
        working.result()


def _gathering(
    stream: Callable[ParamsT, AsyncGenerator[Group, None]],
) -> Callable[ParamsT, Coroutine[Any, Any, list[Group]]]:
    """Give `gather_groups` the parameters of `stream_groups`."""

    async def gather_groups(*args: ParamsT.args, **options: ParamsT.kwargs) -> list[Group]:
        """The scored groups of all tasks, in their order; see `stream_groups` for the arguments and what it raises.

        Groups that were dropped are left out, the parts of one that was split stand side by side, and each group's
        `index` is its task's.

        >>> async def play(rollout: Rollout) -> float:
        ...     rollout.messages = [{"role": "assistant", "content": rollout.task["word"].upper()}]
        ...     return float(len(rollout.task["word"]))
        >>> async def drop_short(group: Group) -> Group | None:
        ...     return group if min(group.rewards) > 2 else None
        >>> words = [{"word": "ada"}, {"word": "no"}, {"word": "leopold"}]
        >>> groups = asyncio.run(gather_groups(play, words, group_size=2, score_group=drop_short))
        >>> [(group.index, group.rewards) for group in groups]
        [(0, [3.0, 3.0]), (2, [7.0, 7.0])]
        """
        async with aclosing(stream(*args, **options)) as groups:
            return sorted([group async for group in groups], key=lambda group: group.index)

    return update_wrapper(gather_groups, stream, assigned=(), updated=())


gather_groups = _gathering(stream_groups)


@dataclass(kw_only=True)
class _Gathering:
    """All groups of one call, from their tasks to the queue that they are taken from."""

    play: Play
    reward: RolloutReward | None
    score_group: ScoreGroup | None
    group_size: int
    concurrency: int | None
    attempts: ErrorTally
    scorer: Scorer
    counts: GroupCounts

    def __post_init__(self) -> None:
        self._slots: AbstractAsyncContextManager[object] = (
            nullcontext() if self.concurrency is None else asyncio.Semaphore(self.concurrency)
        )
        self._waiting = 0  # rollouts without a slot yet
        self._room = asyncio.Event()
        self._finished: asyncio.Queue[Group | None] = asyncio.Queue()
        self._clock = asyncio.get_running_loop().time

    async def next(self) -> Group | None:
        """The next scored group; None when there will be no more."""
        group = await self._finished.get()
        self._room.set()
        return group

    async def run(self, tasks: Iterable[Task | Mapping[str, Json]]) -> None:
        """Play and score everything. Waits for room; nothing that it started still runs when it ends."""
        try:
            with _one_exception_group():
                async with asyncio.TaskGroup() as groups:
                    for index, task in enumerate(tasks):
                        self._waiting += self.group_size
                        groups.create_task(self._run_group(index, _as_task(task, index)))
                        await self._wait_for_room()
                self.attempts.end()
                self.scorer.end()
        finally:
            self._finished.put_nowait(None)

    async def _wait_for_room(self) -> None:
        """With bounded concurrency: until all rollouts have a slot, and few finished groups wait to be taken."""
        while self.concurrency is not None and (self._waiting or self._finished.qsize() > self.concurrency):
            self._room.clear()
            await self._room.wait()

    async def _run_group(self, index: int, task: Task) -> None:
        counts = self.counts
        counts.groups_started += 1
        group_id = GroupId(str(index))
        with _surfaced_cancellation():
            async with asyncio.TaskGroup() as playing:
                members = range(self.group_size)
                attempts = [playing.create_task(self._attempt(task, group_id, member)) for member in members]
            rollouts = [rollout for attempt in attempts if (rollout := attempt.result()) is not None]
            if not rollouts:
                counts.groups_empty += 1
                return
            group = Group(group_id, task, rollouts, index=index)
            try:
                scored = await self.scorer.score_group(group, [] if self.score_group is None else [self.score_group])
            except Exception as error:
                if not self.scorer.has_counted(error):
                    raise
                counts.groups_failed += 1
                return
        if not scored:
            counts.groups_dropped += 1
            return
        counts.add_scored(scored)
        for part in scored:
            self._finished.put_nowait(part)

    async def _attempt(self, task: Task, group_id: GroupId, member: int) -> Rollout | None:
        """One rollout, played and scored on its own; None where it is lost and the error budget allows that."""
        rollout = Rollout(RolloutId(f"{group_id}.{member}"), group_id, task, _SAMPLING)
        counts = self.counts
        with _surfaced_cancellation():
            try:
                async with self._slots:
                    self._waiting -= 1
                    self._room.set()
                    self.attempts.started += 1
                    counts.rollouts_started += 1
                    rollout.started_s = self._clock()
                    returned = await self.play(rollout)
                    result = None if returned is None else as_agent_result(returned)
                    rollout.ended_s = self._clock()
            except Exception as error:  # noqa: BLE001  user code may raise anything; the error budget says what it costs
                counts.rollouts_failed += 1
                self.attempts.fail(error)
                return None
            counts.rollouts_finished += 1
            counts.rollouts_s += rollout.ended_s - rollout.started_s
            return await self._rewarded(rollout, result)

    async def _rewarded(self, rollout: Rollout, reported: AgentResult | None) -> Rollout | None:
        result = reported if self.reward is None else AgentResult()
        if result is None:
            return rollout
        score = None if self.reward is None else self._call_reward
        try:  # a reward that is missing fails with its group
            await self.scorer.score_rollout(rollout, result, score, is_group_scored=score is None)
        except Exception as error:
            if not self.scorer.has_counted(error):
                raise
            self.counts.rewards_failed += 1
            return None
        self.counts.rewards_failed += rollout.reward is None
        return rollout

    async def _call_reward(self, rollout: Rollout, reported: AgentResult) -> AgentResult:
        assert self.reward is not None
        return as_agent_result(await self.reward(rollout))


def _as_task(task: Task | Mapping[str, Json], index: int) -> Task:
    return task if isinstance(task, Task) else Task(TaskId(str(index)), "", index, task)


class _CancelledItself(Exception):
    """User code raised `CancelledError` though nobody had cancelled it; becomes that of the caller."""


@contextmanager
def _surfaced_cancellation() -> Iterator[None]:
    """Raise `_CancelledItself`: task groups ignore a task that ends as cancelled."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _CancelledItself from error


@contextmanager
def _one_exception_group() -> Iterator[None]:
    """One flat group of everything that ended the work, or the `CancelledError` that it began with."""
    try:
        yield
    except ExceptionGroup as group:
        leaves = list(dict.fromkeys(leaves_of(group)))
        itself = next((error for error in leaves if isinstance(error, _CancelledItself)), None)
        if itself is not None:
            raise asyncio.CancelledError from itself.__cause__
        spent = _budget_of(group)
        if spent is not None:
            raise ErrorBudgetSpent(spent.message, leaves) from None
        raise ExceptionGroup(f"groups could not be gathered: {leaves[0]}", leaves) from None


def _budget_of(error: Exception) -> ErrorBudgetSpent | None:
    if isinstance(error, ErrorBudgetSpent):
        return error
    parts = error.exceptions if isinstance(error, ExceptionGroup) else ()
    return next((spent for part in parts if (spent := _budget_of(part)) is not None), None)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended, however often the waiting itself is cancelled."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio logs nothing where the caller is gone
    if cancelled is not None:
        raise cancelled
