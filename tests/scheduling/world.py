"""A scheduler's surroundings, all real but for generation: rollouts are made by a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tailrace.batching import FormedBatch
from tailrace.environments import EnvironmentSpec, Policy
from tailrace.errors import EnvironmentFailed, RolloutTimeout, WorkerLost
from tailrace.lifecycle.event_loop import first_done
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Outcome,
    PlannedBatch,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    StepSkipped,
    StepTrained,
    Task,
    TerminalState,
)
from tailrace.scheduling import SchedulerSetup, SchedulingSettings, StreamScheduler, TaskSource, TaskStream
from tailrace.scheduling.groups import UNSCORED
from tailrace.scheduling.staleness import RESTARTED
from tailrace.scheduling.tasks import TaskStreamState


def _mistake(message: str) -> EnvironmentFailed:
    error = EnvironmentFailed(message)
    error.is_mistake = True
    return error


FAILURES = {error.reason: error for error in (RolloutTimeout, EnvironmentFailed, WorkerLost)} | {"mistake": _mistake}


async def _agent(task: Task, policy: Policy) -> float:
    raise AssertionError("these rollouts are scripted")


def environment(name: str = "toy", rows: int = 8) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, agent=_agent, train_tasks=[{"n": n} for n in range(rows)])


def decoded(state: bytes) -> TaskStreamState:
    """What a scheduler saved at a step."""
    return msgspec.json.decode(state, type=TaskStreamState)


def make_rollout(
    task: Task,
    group_id: GroupId,
    rollout_id: RolloutId,
    *,
    reward: float,
    tokens: int = 3,
    version: int = 0,
    versions: Sequence[int] = (),
) -> Rollout:
    """One branch of `tokens` tokens of `version`, or of one token of each of `versions`."""
    versions = versions or [version] * tokens
    tokens = len(versions)
    branch = Branch()
    branch.extend_context([1, 2])
    branch.extend_completion(
        Completion(
            token_ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1.0, np.float32),
            policy_versions=np.asarray(versions, np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        task=task,
        sampling=SamplingParams(),
        branches=[branch],
        reward=Reward(reward),
    )


@dataclass
class ScriptedRunner:
    """Each rollout's fate is a function of its number, counted over the run."""

    fate: Callable[[int], str | float]
    """A reward, the reason of a failure, or that the reward failed and the rollout is kept unscored."""
    pauses: Callable[[int], int] = lambda number: number % 5
    version: Callable[[], int] = lambda: 0
    pause_s: float = 0.0
    """Of each pause; with 0 it is a turn of the event loop."""
    is_silent: Callable[[int], bool] = lambda number: False
    """Whether it samples no token."""
    splits: bool = False
    """Whether scoring makes two groups of each."""
    started: int = 0
    live: int = 0
    most_live: int = 0
    held: dict[str, asyncio.Event] = field(default_factory=dict)

    async def hold(self, group_ids: Collection[str]) -> None:
        for group_id in group_ids:
            self.held.setdefault(group_id, asyncio.Event())

    def release(self, group_id: str) -> None:
        self.held.pop(group_id).set()

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        number, self.started = self.started, self.started + 1
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            versions = [self.version()]
            for _ in range(self.pauses(number)):
                await asyncio.sleep(self.pause_s)
                while (held := self.held.get(group_id)) is not None:
                    await held.wait()
                versions.append(self.version())
            fate = self.fate(number)
            if isinstance(fate, str) and fate != UNSCORED:
                raise FAILURES[fate]("scripted")
            if self.is_silent(number):
                versions = []
            rollout = make_rollout(task, group_id, rollout_id, reward=0.0, tokens=0, versions=versions)
            rollout.reward = None if isinstance(fate, str) else Reward(fate)
            return rollout
        finally:
            self.live -= 1

    async def score(self, group: Group) -> list[Group]:
        await asyncio.sleep(0)
        if not self.splits:
            return [group]
        middle = len(group.rollouts) // 2
        parts = (group.rollouts[:middle], group.rollouts[middle:])
        return [Group(group.group_id, group.task, part) for part in parts]


@dataclass
class Recorder:
    """A scheduler's observer that only remembers."""

    formed: list[FormedBatch] = field(default_factory=list)
    ended: Counter[TerminalState] = field(default_factory=Counter)
    trained_by_task: Counter[str] = field(default_factory=Counter)
    """Rollouts."""
    outcomes: dict[RolloutId, Outcome] = field(default_factory=dict)
    """Each rollout's terminal state."""
    filtered: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    parts: list[Group] = field(default_factory=list)
    _restarted: set[str] = field(default_factory=set)

    @property
    def restarts(self) -> Counter[str]:
        """Groups that were started again because they had become too old, by task."""
        return Counter(group_id.partition("#")[0] for group_id in self._restarted)

    def rollout_finished(self, rollout: Rollout) -> None:
        self.finished += 1

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        self.ended[outcome.state] += 1
        self.outcomes[rollout_id] = outcome
        if outcome.state is TerminalState.TRAINED:
            self.trained_by_task[rollout_id.partition("#")[0]] += 1
        if outcome.reason == RESTARTED:
            self._restarted.add(rollout_id.rsplit(".", 2)[0])

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        if filter_reason:
            self.filtered[filter_reason] += 1

    def part_released(self, part: Group) -> None:
        self.parts.append(part)

    def batch_sent(self, formed: FormedBatch) -> None:
        self.formed.append(formed)

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        pass


@dataclass
class World:
    """One scheduler, its trainer stand-in and what they did."""

    scheduler: StreamScheduler
    runner: ScriptedRunner
    recorder: Recorder
    batches: asyncio.Queue[PlannedBatch]
    max_staleness: int = 0
    batch_size: int = 0
    over_sampling: float = 1.0
    version: int = 0
    train_s: float = 0.0
    install_s: float = 0.0
    """From a step's end to when its weights serve, as the scheduler is told."""
    lag_s: float = 0.0
    """From then to when they really do."""
    serving: int = 0
    """Version that rollouts are sampled from."""
    skip: Callable[[int], bool] = lambda step: False
    skip_reason: str = "not_finite"
    states: dict[int, bytes] = field(default_factory=dict)
    """Of the scheduler, by step."""

    async def train(self) -> None:
        """Train on what comes, for ever."""
        while True:
            batch = await self.batches.get()
            await asyncio.sleep(self.train_s)
            step = batch.summary.step
            self._require_bound(batch)
            assert batch.summary.trainer_version >= self.version
            event: StepTrained | StepSkipped
            if self.skip(step):
                event = StepSkipped(epoch="e", step=step, version=self.version, reason=self.skip_reason)
            else:
                self.version += 1
                if self.install_s:
                    asyncio.get_running_loop().call_later(self.install_s, self._install, self.version)
                else:
                    self._install(self.version)
                event = StepTrained(epoch="e", step=step, version=self.version, metrics={})
            self.scheduler.handle(event)

    def _install(self, version: int) -> None:
        self.scheduler.weights_installed(version)
        if self.lag_s:
            asyncio.get_running_loop().call_later(self.lag_s, self._serve, version)
        else:
            self._serve(version)

    def _serve(self, version: int) -> None:
        self.serving = max(self.serving, version)

    def _require_bound(self, batch: PlannedBatch) -> None:
        """What the trainer asserts."""
        versions = batch.loss_versions()
        assert versions
        assert max(versions) <= self.version
        assert self.version - min(versions) <= self.max_staleness

    @property
    def ceiling(self) -> int:
        """Of the staleness budget."""
        return int((self.max_staleness + self.over_sampling) * self.batch_size)

    async def run_steps(self, steps: int) -> None:
        """Until so many steps ended: what a run with a last step does, whose tasks go on."""
        running = asyncio.create_task(self.run())
        while self.version < steps:
            await asyncio.sleep(0)
            if running.done():
                await running
        running.cancel()

    async def run(self) -> None:
        """Until the scheduler is done; raises what the trainer asserts. In virtual time a deadlock is an error."""
        await first_done(self.train(), self.scheduler.run())


def make_world(
    fate: Callable[[int], str | float],
    *,
    environments: Sequence[str] = ("toy",),
    rows: int = 16,
    epochs: int | None = 1,
    group_size: int = 4,
    max_staleness: int = 1,
    max_running: int = 8,
    max_steps: int | None = None,
    pauses: Callable[[int], int] = lambda number: number % 5,
    step: int = 0,
    state: bytes = b"",
    resumes: int = 0,
    whole_groups: Sequence[str] = (),
    holds: bool = True,
    **settings: object,
) -> World:
    chosen = SchedulingSettings.model_validate({"batch_size": 2 * group_size, "row_tokens": 1024, **settings})
    runner, recorder = ScriptedRunner(fate, pauses), Recorder()
    batches: asyncio.Queue[PlannedBatch] = asyncio.Queue()
    tasks = TaskStream([TaskSource(environment(name, rows=rows)) for name in environments], seed=0, max_epochs=epochs)
    states: dict[int, bytes] = {}

    async def save_state(step: int, state: bytes) -> None:
        assert step not in {formed.batch.summary.step for formed in recorder.formed}  # it is not sent yet
        states[step] = state

    scheduler = StreamScheduler(
        tasks,
        runner,
        batches.put,
        recorder,
        SchedulerSetup(
            settings=chosen,
            max_staleness=max_staleness,
            max_running=max_running,
            group_sizes=dict.fromkeys(environments, group_size),
            whole_groups=whole_groups,
            save_state=save_state,
        ),
        max_steps=max_steps,
        holder=runner if holds else None,
    )
    scheduler.start(step=step, version=step, serving_version=step, state=state, resumes=resumes)
    world = World(scheduler, runner, recorder, batches, max_staleness, chosen.batch_size, chosen.over_sampling)
    world.version = world.serving = step
    world.states = states
    runner.version = lambda: world.serving
    return world
