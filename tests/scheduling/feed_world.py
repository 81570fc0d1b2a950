"""A feed's surroundings in virtual time: the scheduler, the stream, and a trainer that is not ours, of many ranks.

All real but for generation, which a script does, and for what the trainer computes: it sleeps.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from tailrace.batching import FormedBatch
from tailrace.records import (
    CheckpointSaved,
    FeedSample,
    GroupId,
    ModelStateDictPublished,
    ModelStateDictRef,
    Outcome,
    Rollout,
    RolloutId,
    RunStatus,
    SampleId,
    SamplesDropped,
    SamplesWanted,
    StepDone,
    StepSkipped,
    StepTrained,
    StopRequested,
    Task,
    TerminalState,
    TrainerEnded,
    TrainerStarted,
    TrainingBegan,
    TrainingOver,
    WeightsWritten,
)
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.totals import RunTotals
from tailrace.run.outside_trainer import OutsideTrainer
from tailrace.scheduling import FeedScheduler, SchedulerSetup, SchedulingSettings, TaskSource, TaskStream
from tailrace.transport.channels import wait_until
from tailrace.transport.events.log import MemoryEventLog
from tests.scheduling.world import Recorder, ScriptedRunner, environment, make_rollout
from tests.support.memory_samples import MemorySampleReceiver, MemorySampleStream

EPOCH = "epoch"


class Publisher:
    """A store of weights that holds none."""

    def publish_folder(self, folder: Path, version: int) -> ModelStateDictRef:
        return ModelStateDictRef(version=version, uri=str(folder), num_bytes=0)

    def close(self) -> None:
        """Nothing is open."""


class WatchedStream(MemorySampleStream):
    """Says how many samples are about to be offered."""

    def __init__(self, before_offer: Callable[[int], None]) -> None:
        super().__init__()
        self.offered: list[SampleId] = []
        self._before_offer = before_offer

    @override
    async def offer(self, samples: Sequence[FeedSample]) -> None:
        self._before_offer(len(samples))
        self.offered += [one.sample_id for one in samples]
        await super().offer(samples)


class BranchingRunner(ScriptedRunner):
    """Rollouts of one branch, or of up to three."""

    @override
    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        number = self.started
        rollout = await super().run(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)
        versions = [int(one) for one in rollout.branches[0].policy_versions if one >= 0]
        for _ in range(number % 7 // 5):
            more = make_rollout(task, group_id, rollout_id, reward=0.0, tokens=0, versions=versions)
            rollout.branches += more.branches
        return rollout


@dataclass
class Ends(Recorder):
    """Rollouts that ended twice, and what the lines of the steps say."""

    twice: list[RolloutId] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    recorder: RunRecorder = field(default_factory=RunRecorder)
    totals: RunTotals = field(default_factory=RunTotals)
    """Of the lines of the steps."""
    trained: int = 0
    """Rollouts that had ended so at the newest of them."""

    @override
    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        if rollout_id in self.outcomes:
            self.twice.append(rollout_id)
        super().rollout_ended(rollout_id, rollout, outcome, message)
        self.recorder.rollout_ended(rollout_id, rollout, outcome)

    @override
    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        assert isinstance(event, StepTrained)
        self.steps.append(event.step)
        self.recorder.step_ended(formed.batch.summary, formed.groups)
        self.totals.add({"step": event.step, "policy/version": event.version, **self.recorder.flush()})
        self.trained = self.ended[TerminalState.TRAINED]


class FeedWorld:
    """One run with a feed, from the trainer's beginning to its terminal record."""

    def __init__(
        self,
        runner: ScriptedRunner,
        *,
        rows: int = 12,
        epochs: int | None = None,
        group_size: int = 4,
        max_staleness: int = 1,
        max_running: int = 8,
        install_s: float = 0.0,
        retained_bytes: int = 1 << 30,
        **settings: object,
    ) -> None:
        chosen = SchedulingSettings.model_validate({"batch_size": 2 * group_size, **settings})
        self.max_staleness, self.install_s = max_staleness, install_s
        self.runner, self.ends = runner, Ends()
        self.stream, self.log = WatchedStream(self._before_offer), MemoryEventLog(EPOCH)
        self.states: dict[int, bytes] = {}
        self.scheduler = FeedScheduler(
            TaskStream([TaskSource(environment(rows=rows))], seed=0, max_epochs=epochs),
            runner,
            self.stream,
            self.ends,
            SchedulerSetup(
                settings=chosen,
                max_staleness=max_staleness,
                max_running=max_running,
                group_sizes={"toy": group_size},
                save_state=self._save,
            ),
            retained_bytes=retained_bytes,
        )
        self.trainer = OutsideTrainer(self.stream, Publisher(), self.log, last_read_s=60.0)
        self.trainer.listen(self.scheduler)
        self.serving = self.step = 0
        self.window = 2 * chosen.batch_size
        self.most_over = -self.window
        """Samples in hand beyond the window, where no consumer waits, before a group is handed over."""
        self.failure: BaseException | None = None
        runner.version = lambda: self.serving
        self._scheduling: asyncio.Task[None] | None = None

    async def run(self) -> TrainerEnded:
        """As the orchestrator does it: until the terminal record, its own where the trainer is gone."""
        follower = asyncio.create_task(self._follow(), name="follower")
        gone = asyncio.ensure_future(self.trainer.gone())
        try:
            await asyncio.wait({follower, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.failure = gone.result()
                await self.request_stop(RunStatus.FAILED, str(self.failure))
                ended = TrainerEnded(epoch=EPOCH, status=RunStatus.FAILED, step=self.step, reason=str(self.failure))
                await self.log.append(ended)
            return await follower
        finally:
            gone.cancel()
            if self._scheduling is not None:
                self._scheduling.cancel()
            await asyncio.gather(gone, *([self._scheduling] if self._scheduling else []), return_exceptions=True)
            self.scheduler.finish("run_ended")
            await self.trainer.end_feed()
            await self.log.close()
            await self.trainer.close()

    async def request_stop(self, status: RunStatus, reason: str) -> None:
        await self.log.append(StopRequested(epoch=EPOCH, role="orchestrator", status=status, reason=reason))

    def _before_offer(self, count: int) -> None:
        figures = self.scheduler.figures
        if not figures.wanted:
            self.most_over = max(self.most_over, figures.in_hand - count - self.window + 1)

    async def _save(self, step: int, state: bytes) -> None:
        self.states[step] = state

    async def _follow(self) -> TrainerEnded:
        async for event in self.log.follow():
            match event:
                case TrainerStarted() if self._scheduling is None:
                    self.step = event.step
                    self.scheduler.start(step=event.step, version=event.version, serving_version=event.version)
                    self._scheduling = asyncio.create_task(self._schedule(), name="scheduler")
                case StepTrained() if event.step > self.step:
                    self.step = event.step
                    self.scheduler.handle(event)
                case ModelStateDictPublished():
                    asyncio.get_running_loop().call_later(self.install_s, self._install, event.ref.version)
                case StopRequested() if self._scheduling is not None:
                    self._scheduling.cancel()
                case TrainerEnded():
                    return event
        raise AssertionError("the log ended")

    async def _schedule(self) -> None:
        await self.scheduler.run()
        await self.request_stop(RunStatus.FINISHED, "every task was handed out")

    def _install(self, version: int) -> None:
        if version > self.serving:
            self.serving = version
            self.scheduler.weights_installed(version)


@dataclass
class RankState:
    """What one rank has."""

    receiver: MemorySampleReceiver
    fetched: list[FeedSample] = field(default_factory=list)
    needs: int = 0
    """Samples of the step that it is in."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class Consumer:
    """A trainer of its own mind: takes more or fewer samples than was configured, fetches ahead, dies, comes back."""

    world: FeedWorld
    steps: int
    batch_samples: int
    ranks: int = 1
    prefetch: float = 1.0
    """Of its share of a step, what each rank fetches ahead."""
    spread: float = 0.2
    train_s: float = 1.0
    drops: float = 0.0
    """Share of the samples that it will not train on."""
    rank_deaths: float = 0.0
    """Per step: how likely one rank dies in it, and comes back."""
    deaths: float = 0.0
    """Per step: how likely all die in it, and come back from the last checkpoint."""
    checkpoint_every: int = 2
    seed: int = 0
    step: int = 0
    saved: int = 0
    taken: dict[int, tuple[SampleId, ...]] = field(default_factory=dict)
    """By step, of the history that survives."""
    trained: set[SampleId] = field(default_factory=set)
    """Of all histories."""
    stopped: StopRequested | None = None
    lives: int = 0
    oldest_excess: int = 0
    """By how many versions the oldest token with loss was older than is allowed, at the hand-over."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._ranks: dict[str, RankState] = {}
        self._noticed = asyncio.Event()

    async def run(self) -> None:
        """All of its lives, until it took its steps or was asked to stop; its terminal record is last."""
        while self.step < self.steps and self.stopped is None:
            await self._live()
        for rank in self._ranks.values():
            if rank.task is not None:
                rank.task.cancel()
        reason = "" if self.stopped is None else self.stopped.reason
        status = RunStatus.FINISHED if self.stopped is None else self.stopped.status
        leader = self._ranks["rank-0"].receiver
        await leader.report(TrainingOver(consumer="rank-0", status=status, reason=reason))

    async def _live(self) -> None:
        self.lives += 1
        for number in range(self.ranks):
            self._join(f"rank-{number}")
        leader = self._ranks["rank-0"].receiver
        self.step = self.saved
        self.taken = {step: ids for step, ids in self.taken.items() if step <= self.step}
        await leader.report(TrainingBegan(consumer="rank-0", step=self.step, version=self.step))
        while self.step < self.steps and self.stopped is None:
            if not await self._train_step():
                return

    def _join(self, name: str) -> None:
        rank = self._ranks[name] = RankState(self.world.stream.join(name))
        rank.task = asyncio.create_task(self._fetch(rank), name=f"fetch of {name}")

    def _lose(self, name: str) -> None:
        rank = self._ranks.pop(name)
        assert rank.task is not None
        rank.task.cancel()
        self.world.stream.lose(name, "died")

    async def _fetch(self, rank: RankState) -> None:
        """Keep some samples ready beyond what a step takes."""
        ahead = max(1, round(self.prefetch * self.batch_samples / self.ranks))
        while True:
            await wait_until(rank.changed, lambda: len(rank.fetched) < max(ahead, rank.needs))
            pulled = await rank.receiver.pull(self.random.randint(1, max(ahead, rank.needs) - len(rank.fetched)))
            if isinstance(pulled, StopRequested):
                self.stopped = pulled
                self._notice()
                return
            for one in pulled:
                self._check(one)
            rank.fetched += pulled
            self._notice()

    def _notice(self) -> None:
        for rank in self._ranks.values():
            rank.changed.set()
        self._noticed.set()

    def _check(self, one: FeedSample) -> None:
        oldest = min(one.sample.loss_versions())
        self.oldest_excess = max(self.oldest_excess, one.trainer_version - oldest - self.world.max_staleness)

    async def _train_step(self) -> bool:
        """One step over all ranks; whether the trainer still lives."""
        wanted = max(self.ranks, round(self.batch_samples * (1 + self.random.uniform(-self.spread, self.spread))))
        shares = [wanted // self.ranks + (number < wanted % self.ranks) for number in range(self.ranks)]
        if self.random.random() < self.rank_deaths:
            name = f"rank-{self.random.randrange(1, self.ranks)}" if self.ranks > 1 else "rank-0"
            self._lose(name)
            await asyncio.sleep(self.random.uniform(0, 5))
            self._join(name)
        for number, share in enumerate(shares):
            await self._gather(f"rank-{number}", share)
        if self.stopped is not None:
            return True
        if self.random.random() < self.deaths:
            for name in [*self._ranks]:
                self._lose(name)
            await asyncio.sleep(self.random.uniform(0, 30))
            return False
        ids: list[SampleId] = []
        for number, share in enumerate(shares):
            rank = self._ranks[f"rank-{number}"]
            ids += [one.sample_id for one in rank.fetched[:share]]
            del rank.fetched[:share]
            rank.needs = 0
        self._notice()
        await asyncio.sleep(self.train_s * self.random.uniform(0.5, 1.5))
        await self._tell_step(tuple(ids))
        return True

    async def _gather(self, name: str, share: int) -> None:
        """Wait until a rank has its share; say what it lacks."""
        rank = self._ranks[name]
        rank.needs = share
        rank.changed.set()
        if len(rank.fetched) < share:
            lacking = share - len(rank.fetched)
            await rank.receiver.report(SamplesWanted(consumer=name, samples=lacking))
        await wait_until(self._noticed, lambda: len(rank.fetched) >= share or self.stopped is not None)

    async def _tell_step(self, ids: tuple[SampleId, ...]) -> None:
        leader, step = self._ranks["rank-0"].receiver, self.step + 1
        dropped = tuple(one for one in ids[1:] if self.random.random() < self.drops)
        if dropped:
            await leader.report(SamplesDropped(consumer="rank-0", sample_ids=dropped, reason="too_long"))
        trained = tuple(one for one in ids if one not in dropped)
        await leader.report(StepDone(consumer="rank-0", step=step, version=step, sample_ids=trained))
        await leader.report(WeightsWritten(consumer="rank-0", version=step, folder=f"step-{step}"))
        self.step, self.taken[step] = step, trained
        self.trained |= {*trained}
        if step % self.checkpoint_every == 0:
            self.saved = step
            await leader.report(CheckpointSaved(consumer="rank-0", step=step))


def surviving(consumer: Consumer) -> Sequence[SampleId]:
    """All samples of the steps that survive, in order."""
    return [one for step in sorted(consumer.taken) for one in consumer.taken[step]]
