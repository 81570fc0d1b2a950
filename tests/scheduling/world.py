"""A scheduler's surroundings, all real but for generation: rollouts are made by a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tailrace.batching import FormedBatch
from tailrace.environments import EnvironmentSpec, Policy
from tailrace.errors import EnvironmentFailed, RolloutTimeout
from tailrace.records import (
    Batch,
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Outcome,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    StepSkipped,
    StepTrained,
    Task,
    TerminalState,
)
from tailrace.scheduling import SchedulingSettings, StreamScheduler, TaskSource, TaskStream

FAILURES = {error.reason: error for error in (RolloutTimeout, EnvironmentFailed)}


async def _agent(task: Task, policy: Policy) -> float:
    raise AssertionError("these rollouts are scripted")


def environment(name: str = "toy", rows: int = 8) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, agent=_agent, train_tasks=[{"n": n} for n in range(rows)])


def make_rollout(
    task: Task, group_id: GroupId, rollout_id: RolloutId, *, reward: float, tokens: int = 3, version: int = 0
) -> Rollout:
    branch = Branch()
    branch.extend_context([1, 2])
    branch.extend_completion(
        Completion(
            token_ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1.0, np.float32),
            policy_versions=np.full(tokens, version, np.int32),
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
    """A reward, or the reason of a failure."""
    pauses: Callable[[int], int] = lambda number: number % 5
    version: Callable[[], int] = lambda: 0
    started: int = 0
    live: int = 0
    most_live: int = 0

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        number, self.started = self.started, self.started + 1
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            version = self.version()
            for _ in range(self.pauses(number)):
                await asyncio.sleep(0)
            fate = self.fate(number)
            if isinstance(fate, str):
                raise FAILURES[fate]("scripted")
            return make_rollout(task, group_id, rollout_id, reward=fate, version=version)
        finally:
            self.live -= 1

    async def score(self, group: Group) -> list[Group]:
        await asyncio.sleep(0)
        return [group]


@dataclass
class Recorder:
    """A scheduler's observer that only remembers."""

    formed: list[FormedBatch] = field(default_factory=list)
    ended: Counter[TerminalState] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    finished: int = 0

    def rollout_finished(self, rollout: Rollout) -> None:
        self.finished += 1

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        self.ended[outcome.state] += 1

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        if filter_reason:
            self.filtered[filter_reason] += 1

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
    batches: asyncio.Queue[Batch]
    version: int = 0
    skip: Callable[[int], bool] = lambda step: False

    async def train(self) -> None:
        """Train on what comes, for ever."""
        while True:
            batch = await self.batches.get()
            await asyncio.sleep(0)
            step = batch.summary.step
            assert batch.summary.judged_version >= self.version
            event: StepTrained | StepSkipped
            if self.skip(step):
                event = StepSkipped(epoch="e", step=step, version=self.version, reason="not_finite")
            else:
                self.version += 1
                event = StepTrained(epoch="e", step=step, version=self.version, metrics={})
            self.scheduler.handle(event)

    async def run_steps(self, steps: int) -> None:
        """Until so many steps ended: what a run with a last step does, whose tasks go on."""
        running = asyncio.create_task(self.run())
        while self.version < steps:
            await asyncio.sleep(0)
            if running.done():
                await running
        running.cancel()

    async def run(self) -> None:
        """Until the scheduler is done, within a generous deadline that only a deadlock reaches."""
        trainer = asyncio.create_task(self.train())
        try:
            async with asyncio.timeout(5):
                await self.scheduler.run()
        finally:
            trainer.cancel()


def make_world(
    fate: Callable[[int], str | float],
    *,
    rows: int = 16,
    epochs: int | None = 1,
    group_size: int = 4,
    max_staleness: int = 1,
    max_running: int = 8,
    max_steps: int | None = None,
    pauses: Callable[[int], int] = lambda number: number % 5,
    state: bytes = b"",
    **settings: object,
) -> World:
    chosen = SchedulingSettings.model_validate({"batch_size": 2 * group_size, "row_tokens": 64, **settings})
    runner, recorder = ScriptedRunner(fate, pauses), Recorder()
    batches: asyncio.Queue[Batch] = asyncio.Queue()
    tasks = TaskStream([TaskSource(environment(rows=rows))], seed=0, max_epochs=epochs)
    if state:
        tasks.restore(state)
    scheduler = StreamScheduler(
        tasks,
        runner,
        batches.put,
        recorder,
        settings=chosen,
        max_staleness=max_staleness,
        max_running=max_running,
        group_sizes={"toy": group_size},
        max_steps=max_steps,
    )
    world = World(scheduler, runner, recorder, batches)
    runner.version = lambda: world.version
    return world
