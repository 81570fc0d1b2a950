"""Samples handed to a trainer that is not ours, in virtual time, where whatever waits for ever is an error."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tailrace.errors import ConsumerRefused, Misreported
from tailrace.records import (
    ConsumerJoined,
    FeedReport,
    FeedSample,
    GroupId,
    Rollout,
    RolloutId,
    RunStatus,
    SampleId,
    SamplesDropped,
    SamplesTaken,
    SamplesWanted,
    StepDone,
    StopRequested,
    Task,
    TerminalState,
    TrainerEnded,
    TrainingBegan,
    TrainingOver,
    WeightsWritten,
)
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.feed_world import BranchingRunner, Consumer, FeedWorld, surviving
from tests.scheduling.world import decoded
from tests.support.memory_samples import MemorySampleReceiver

SEEDS, ALL_SEEDS = 120, 1000
PARTS = 4
"""So that test processes share the work."""
FATES = [0.0, 1.0, 1.0, 0.0, "timeout", "environment_failed"]
_SCRIPT = 997
"""Fates that are drawn; no group size divides it, so that no pattern of them repeats with the groups."""


@dataclass
class Told:
    """What a scenario came to."""

    world: FeedWorld
    consumer: Consumer
    ended: TrainerEnded
    returned: int
    rewound: int


def drawn(seed: int) -> Told:
    """A run of the test's trainer under this seed, to its end. Raises what broke."""
    draw = random.Random(seed)
    fates = [draw.choice(FATES) for _ in range(_SCRIPT)]
    pauses = [draw.randint(0, 12) for _ in range(draw.randint(1, 11))]
    runner = BranchingRunner(
        lambda number: fates[number % _SCRIPT], pauses=lambda number: pauses[number % len(pauses)], pause_s=1.0
    )
    group_size, release = draw.randint(2, 5), draw.choice(["together", "together", "early"])
    batch_size = group_size * draw.randint(1, 4)
    settings: dict[str, Any] = {
        "rows": draw.choice([3, 12, 50]),
        "group_size": group_size,
        "max_staleness": draw.randint(0, 4),
        "max_running": draw.randint(1, 20),
        "install_s": draw.choice([0.0, 0.5, 15.0]),
        "batch_size": batch_size,
        "buffer_batches": draw.choice([0.0, 0.5, 1.0, 3.0]),
        "max_retries": draw.randint(0, 2),
        "min_group_size": draw.randint(1, group_size),
        "group_release": release,
        "on_stale": draw.choice(["mask", "drop", "mask" if release == "early" else "restart"]),
        "max_restarts": draw.randint(0, 2),
        "retained_bytes": draw.choice([0, 1000, 1 << 30]),
    }
    trainer: dict[str, Any] = {
        "steps": draw.randint(2, 8),
        "ranks": draw.choice([1, 1, 2, 3, 4, 8, 16]),
        "prefetch": draw.choice([0.0, 0.5, 1.0, 2.0, 4.0]),
        "train_s": draw.choice([0.0, 1.0, 10.0]),
        "drops": draw.choice([0.0, 0.0, 0.1]),
        "rank_deaths": draw.choice([0.0, 0.0, 0.3]),
        "deaths": draw.choice([0.0, 0.0, 0.2]),
        "checkpoint_every": draw.randint(1, 3),
        "batch_samples": batch_size,
        "seed": seed,
    }

    async def main() -> Told:
        world = FeedWorld(runner, max_barren_batches=100_000, max_failing_s=1e9, **settings)
        consumer = Consumer(world, **trainer)
        ended = await together(world, consumer)
        assert {one for one in asyncio.all_tasks() if one is not asyncio.current_task()} == set()
        return Told(world, consumer, ended, world.scheduler.figures.returned, consumer.lives - 1)

    return run_in_virtual_time(main())


async def together(world: FeedWorld, consumer: Consumer) -> TrainerEnded:
    """Run and trainer, until both have ended; what fails the trainer ends the run."""
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(world.run(), name="run")
        tasks.create_task(consumer.run(), name="consumer")
    return run.result()


def broken_laws(told: Told) -> list[str]:
    """One sentence for each law that does not hold."""
    world, consumer, ledger = told.world, told.consumer, told.world.scheduler.ledger
    trained = surviving(consumer)
    ends = Counter(outcome.state for outcome in world.ends.outcomes.values())
    tasks = decoded(world.states[max(world.states)]).mix.environments["toy"].trained
    groups = len({group_of(one) for one in consumer.trained})
    laws = {
        f"the run ended as {told.ended}": told.ended.status is RunStatus.FINISHED,
        f"{consumer.step} of {consumer.steps} steps": consumer.step == consumer.steps == told.ended.step,
        f"figures of the steps {world.ends.steps}": world.ends.steps == list(range(1, consumer.steps + 1)),
        "a sample was trained on twice": len({*trained}) == len(trained),
        f"these ended twice: {world.ends.twice[:3]}": not world.ends.twice,
        "a token was too old at its hand-over": consumer.oldest_excess <= 0,
        f"the ledger does not balance: {ledger}": not ledger.in_flight,
        f"the lines of the steps say {world.ends.totals.rollouts_trained} trained, and not {world.ends.trained}": (
            world.ends.totals.rollouts_trained == world.ends.trained
        ),
        f"the ledger says {ledger}, the observer {ends}": all(
            ledger.total(state) == ends[state] for state in TerminalState if state is not TerminalState.CANCELLED
        ),
        "a rollout whose samples were all trained did not end as trained": is_accounted(told, trained),
        f"{world.most_over} samples beyond what credits allow": world.most_over <= 0,
        f"{tasks} tasks ended as trained, and samples of {groups} groups were trained on": tasks == groups,
    }
    return [law for law, holds in laws.items() if not holds]


def group_of(sample_id: SampleId) -> GroupId:
    """The group that a sample is of."""
    return GroupId(sample_id.rsplit(".", 2)[0])


def is_accounted(told: Told, trained: Sequence[SampleId]) -> bool:
    """Whether the rollouts of the samples that were trained on have an end of that kind, or are on their way to it."""
    rollouts = {one.rpartition("/")[0] for one in trained}
    outcomes = told.world.ends.outcomes
    return all(outcomes[one].state is TerminalState.TRAINED for one in rollouts if one in outcomes)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("tailrace").setLevel(logging.ERROR)


def what_breaks(seeds: Sequence[int]) -> dict[int, str]:
    found = {}
    for seed in seeds:
        try:
            broken = broken_laws(drawn(seed))
        except Exception as error:  # noqa: BLE001  (any error is a finding)
            broken = [f"{type(error).__name__}: {error}"]
        if broken:
            found[seed] = "; ".join(broken)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_a_trainer_of_its_own_mind_always_gets_its_steps(part: int) -> None:
    assert what_breaks(range(part, SEEDS, PARTS)) == {}


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_a_trainer_of_its_own_mind_always_gets_its_steps_under_many_seeds(part: int) -> None:
    assert what_breaks(range(SEEDS + part, ALL_SEEDS, PARTS)) == {}


def test_the_seeds_meet_every_kind_of_trouble() -> None:
    told = [drawn(seed) for seed in range(40)]
    assert sum(one.returned > 0 for one in told) > 5
    assert sum(one.rewound > 0 for one in told) > 2
    assert any("too_long" in one.world.scheduler.ledger.reasons(TerminalState.FILTERED) for one in told)
    assert {1, 16} <= {one.consumer.ranks for one in told}


# --- by hand ---------------------------------------------------------------------------------------------------------


class Hand:
    """A trainer of one rank that does as it is told."""

    def __init__(self, **settings: object) -> None:
        rewards = [0.0, 1.0]
        runner = BranchingRunner(lambda number: rewards[number % 2], pauses=lambda number: 1, pause_s=1.0)
        chosen: dict[str, Any] = {"batch_size": 4, "group_size": 4, "rows": 50, "max_running": 8, **settings}
        self.world = FeedWorld(runner, **chosen)
        self.receiver: MemorySampleReceiver
        self.running: asyncio.Task[TrainerEnded]

    async def __aenter__(self) -> Hand:
        self.running = asyncio.create_task(self.world.run(), name="run")
        self.receiver = self.world.stream.join("rank-0")
        await self.tell(TrainingBegan(consumer="rank-0", step=0, version=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def tell(self, report: FeedReport) -> None:
        await self.receiver.report(report)

    async def pull(self, count: int) -> list[FeedSample]:
        samples: list[FeedSample] = []
        while len(samples) < count:
            pulled = await self.receiver.pull(count - len(samples))
            assert not isinstance(pulled, StopRequested)
            samples += pulled
        return samples

    async def pull_all(self) -> list[FeedSample]:
        """What nobody has, once nothing more is handed over."""
        await asyncio.sleep(100)
        figures = self.world.scheduler.figures
        return await self.pull(figures.in_hand - figures.taken)

    async def train(self, step: int, samples: Sequence[FeedSample], version: int | None = None) -> None:
        version = step if version is None else version
        ids = tuple(one.sample_id for one in samples)
        await self.tell(StepDone(consumer="rank-0", step=step, version=version, sample_ids=ids))
        await self.tell(WeightsWritten(consumer="rank-0", version=version, folder=f"{version}"))

    async def refused(self) -> str:
        """Why the run ended itself."""
        ended = await self.running
        assert ended.status is RunStatus.FAILED
        assert isinstance(self.world.failure, Misreported)
        return ended.reason

    @property
    def trained(self) -> int:
        return self.world.scheduler.ledger.total(TerminalState.TRAINED)


async def _untrue(hand: Hand, report: FeedReport) -> str:
    """Two true steps, then the report."""
    for step in (1, 2):
        await hand.train(step, await hand.pull(2))
    await asyncio.sleep(1)
    before = hand.trained
    await hand.tell(report)
    reason = await hand.refused()
    assert hand.trained == before  # nothing of it counts
    return reason


NEVER = SampleId("toy/train/0#99.0.0/0")


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (StepDone(consumer="rank-0", step=3, version=3, sample_ids=()), "step 3 without a sample"),
        (StepDone(consumer="rank-0", step=3, version=3, sample_ids=(NEVER,)), "1 samples that were never handed over"),
        (StepDone(consumer="rank-0", step=2, version=3, sample_ids=(NEVER,)), "step 2 after step 2"),
        (StepDone(consumer="rank-0", step=3, version=1, sample_ids=(NEVER,)), "version 1 after version 2"),
        (StepDone(consumer="rank-1", step=3, version=3, sample_ids=(NEVER,)), "there is none of that name"),
        (StepDone(consumer="rank-0", step=3, version=3, sample_ids=(NEVER, NEVER)), "a sample twice"),
        (SamplesTaken(consumer="rank-0", sample_ids=(NEVER,)), "took 1 samples that were never handed over"),
        (SamplesDropped(consumer="rank-0", sample_ids=(NEVER,), reason="why"), "dropped 1 samples that were never"),
        (SamplesDropped(consumer="rank-0", sample_ids=(), reason="a/b"), "for the reason 'a/b'"),
        (SamplesWanted(consumer="rank-0", samples=-1), "wants -1 samples"),
        (ConsumerJoined(consumer="rank-0"), "two consumers are called 'rank-0'"),
        (WeightsWritten(consumer="rank-0", version=1, folder="1"), "weights of version 1 after those of version 2"),
        (TrainingBegan(consumer="rank-0", step=7, version=7), "steps that nobody heard of"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value.replace(" ", "-"),
)
def test_what_cannot_be_ends_the_run_and_nothing_of_it_counts(report: FeedReport, reason: str) -> None:
    async def main() -> str:
        async with Hand() as hand:
            return await _untrue(hand, report)

    assert reason in run_in_virtual_time(main())


def test_what_was_offered_and_nobody_took_cannot_be_trained_on() -> None:
    async def main() -> str:
        async with Hand() as hand:
            first = await hand.pull(1)
            await asyncio.sleep(10)
            untaken = [one for one in hand.world.stream.offered if one != first[0].sample_id]
            await hand.tell(StepDone(consumer="rank-0", step=1, version=1, sample_ids=(first[0].sample_id, untaken[0])))
            return await hand.refused()

    assert "which nobody was given yet" in run_in_virtual_time(main())


def test_a_second_consumer_of_one_name_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        async with Hand() as hand:
            with pytest.raises(ConsumerRefused, match="'rank-0' is there already"):
                hand.world.stream.join("rank-0")
            await hand.train(1, await hand.pull(4))
            await hand.tell(TrainingOver(consumer="rank-0", status=RunStatus.FINISHED, reason="enough"))
            assert (await hand.running).status is RunStatus.FINISHED

    run_in_virtual_time(main())


def test_credits_bound_what_is_handed_over_and_come_back_by_name() -> None:
    async def main() -> None:
        async with Hand() as hand:
            await asyncio.sleep(100)
            window = hand.world.scheduler.figures.in_hand
            assert 8 <= window < 8 + 3 * 4  # two batches' worth; a group goes whole
            samples = await hand.pull(window)
            await asyncio.sleep(100)
            assert hand.world.scheduler.figures.in_hand == window  # taking gives no credit back
            await hand.tell(
                SamplesDropped(consumer="rank-0", sample_ids=tuple(one.sample_id for one in samples), reason="too_long")
            )
            again = await hand.pull(8)
            assert not {one.sample_id for one in samples} & {one.sample_id for one in again}
            assert hand.world.scheduler.ledger.reasons(TerminalState.FILTERED)["too_long"] > 0
            hand.world.stream.lose("rank-0", "died")
            hand.receiver = hand.world.stream.join("rank-0")
            assert {one.sample_id for one in again} <= {one.sample_id for one in await hand.pull_all()}

    run_in_virtual_time(main())


def test_a_consumer_that_waits_is_lent_what_it_lacks() -> None:
    async def main() -> None:
        async with Hand(max_staleness=0) as hand:
            await hand.tell(SamplesWanted(consumer="rank-0", samples=50))
            samples = await hand.pull(50)
            assert {one.trainer_version for one in samples} == {0}
            await hand.train(1, samples)

    run_in_virtual_time(main())


def test_a_lost_sample_that_somebody_trained_on_after_all_is_not_handed_over_again() -> None:
    async def main() -> None:
        async with Hand() as hand:
            other = hand.world.stream.join("rank-1")
            await asyncio.sleep(100)
            pulled = await other.pull(100)
            assert not isinstance(pulled, StopRequested)
            hand.world.stream.lose("rank-1", "silent")
            await asyncio.sleep(1)  # all are offered again, and nobody has them
            assert {hand.world.stream.offered.count(one.sample_id) for one in pulled} == {2}
            await hand.train(1, pulled[:3])
            await asyncio.sleep(1)
            assert hand.world.step == 1
            later = {one.sample_id for one in await hand.pull_all()}
            assert not later & {one.sample_id for one in pulled[:3]}
            assert later >= {one.sample_id for one in pulled[3:]}

    run_in_virtual_time(main())


def test_a_trainer_that_goes_back_is_given_what_it_gave_up() -> None:
    async def main() -> None:
        async with Hand() as hand:
            first, second = await hand.pull(4), await hand.pull(4)
            await hand.train(1, first)
            await hand.train(2, second)
            await asyncio.sleep(1)
            trained = hand.trained
            hand.world.stream.lose("rank-0", "died")
            hand.receiver = hand.world.stream.join("rank-0")
            await hand.tell(TrainingBegan(consumer="rank-0", step=1, version=1))
            again = await hand.pull(12)
            assert {one.sample_id for one in second} <= {one.sample_id for one in again}
            assert not {one.sample_id for one in first} & {one.sample_id for one in again}
            await hand.train(2, again)
            await hand.train(3, await hand.pull(4))
            await asyncio.sleep(1)
            assert hand.trained > trained
            assert hand.world.ends.steps == [1, 2, 3]  # step 2 has its figures once
            assert hand.world.ends.totals.rollouts_trained == hand.trained  # what it took anew the second time, too
            assert not hand.world.ends.twice

    run_in_virtual_time(main())


@pytest.mark.parametrize("group_release", ["together", "early"])
def test_a_task_ends_as_trained_with_any_of_its_rollouts_and_as_untrained_with_the_last(group_release: str) -> None:
    async def main() -> None:
        async with Hand(group_release=group_release, batch_size=12) as hand:
            groups: dict[GroupId, list[FeedSample]] = {}
            for one in await hand.pull_all():
                groups.setdefault(group_of(one.sample_id), []).append(one)
            first, second, third = [*groups.values()][:3]

            async def drop(samples: Sequence[FeedSample]) -> None:
                ids = tuple(one.sample_id for one in samples)
                await hand.tell(SamplesDropped(consumer="rank-0", sample_ids=ids, reason="too_long"))

            def rollout_of(samples: Sequence[FeedSample]) -> list[FeedSample]:
                return [one for one in samples if one.sample.rollout_id == samples[0].sample.rollout_id]

            def ended(step: int) -> tuple[int, int, list[bool]]:
                state = decoded(hand.world.states[step])
                toy, listed = state.mix.environments["toy"], {f"toy/train/{key.index}" for key in state.outstanding}
                return toy.ended, toy.trained, [samples[0].task_id in listed for samples in (first, second, third)]

            for samples in (first, second, third):
                await drop(rollout_of(samples))
            await hand.train(1, first[len(rollout_of(first)) :])
            await drop(third[len(rollout_of(third)) :])
            await hand.train(2, second[len(rollout_of(second)) :])
            await asyncio.sleep(1)
            assert ended(1) == (1, 1, [False, True, True])
            assert ended(2) == (3, 2, [False, False, False])

    run_in_virtual_time(main())


def test_too_old_samples_of_a_lost_consumer_are_filtered() -> None:
    async def main() -> None:
        async with Hand(max_staleness=1) as hand:
            other = hand.world.stream.join("rank-1")
            lost = await other.pull(4)
            assert not isinstance(lost, StopRequested)
            branch = lost[0].sample.branch
            branch.set_column("cross_entropy_weights", [1.0], start=branch.num_tokens - 1)  # which is never too old
            for step in (1, 2, 3, 4):
                await hand.tell(SamplesWanted(consumer="rank-0", samples=4))
                await hand.train(step, await hand.pull(4))
            hand.world.stream.lose("rank-1", "died")
            again = {one.sample_id for one in await hand.pull_all()}
            assert [one.sample_id in again for one in lost] == [True, False, False, False]
            assert hand.world.scheduler.ledger.reasons(TerminalState.FILTERED)["stale"] > 0

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("group_release", "silent"), [("together", range(4)), ("early", [11])], ids=["groups", "parts"]
)
def test_what_sampled_no_token_is_filtered_and_the_run_comes_to_its_end(
    group_release: str, silent: Sequence[int]
) -> None:
    async def main() -> None:
        rewards = [0.0, 1.0]
        runner = BranchingRunner(
            lambda number: rewards[number % 2],
            lambda number: 1,
            pause_s=1.0,
            is_silent=lambda number: number % 12 in silent,
        )
        world = FeedWorld(runner, epochs=1, advantage="mean", group_release=group_release)
        ended = await together(world, Consumer(world, steps=1000, batch_samples=8))
        assert ended.status is RunStatus.FINISHED
        assert world.scheduler.ledger.reasons(TerminalState.FILTERED) == {"nothing_sampled": 4 * len(silent)}

    run_in_virtual_time(main())


def test_demonstrations_alone_are_handed_over() -> None:
    async def main() -> None:
        hand = Hand()
        play = hand.world.runner.run

        async def demonstrate(task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
            rollout = await play(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)
            for branch in rollout.branches:
                branch.set_column("cross_entropy_weights", [1.0], start=branch.num_tokens - 1)
            return rollout

        hand.world.runner.is_silent = lambda number: True
        hand.world.runner.run = demonstrate  # type: ignore[method-assign]
        async with hand:
            for step in (1, 2, 3):
                samples = await hand.pull(4)
                assert [one.sample.loss_versions() for one in samples] == [{}] * 4
                await hand.train(step, samples)
            assert hand.trained > 4

    run_in_virtual_time(main())


def test_when_the_data_are_used_up_a_consumer_that_waits_is_asked_to_end() -> None:
    async def main() -> None:
        hand = Hand(rows=2, epochs=1)
        async with hand:
            samples = await hand.pull(8)
            await hand.tell(SamplesWanted(consumer="rank-0", samples=100))
            pulled: list[FeedSample] | StopRequested = []
            while not isinstance(pulled, StopRequested):
                samples += pulled
                pulled = await hand.receiver.pull(100)
            assert pulled.status is RunStatus.FINISHED
            await hand.train(1, samples)
            await hand.tell(TrainingOver(consumer="rank-0", status=pulled.status, reason=""))
            ended = await hand.running
            assert (ended.status, ended.step) == (RunStatus.FINISHED, 1)
            assert hand.trained == 8

    run_in_virtual_time(main())


def test_without_a_consumer_admission_pauses_and_says_for_whom() -> None:
    async def main() -> None:
        async with Hand() as hand:
            await hand.pull(1)
            hand.world.stream.lose("rank-0", "died")
            await asyncio.sleep(1000)
            started = hand.world.scheduler.statistics
            await asyncio.sleep(1000)
            assert hand.world.scheduler.statistics.admitted == started.admitted
            assert started.running == 0
            assert "no rank of the outside trainer is there" in hand.world.scheduler.describe_waiting()
            hand.receiver = hand.world.stream.join("rank-0")
            await asyncio.sleep(1)
            await hand.pull(8)
            assert "to train on the" in hand.world.scheduler.describe_waiting()

    run_in_virtual_time(main())


def test_a_trainer_that_writes_no_weights_is_named() -> None:
    async def main() -> None:
        async with Hand(max_staleness=0) as hand:
            samples = await hand.pull(4)
            ids = tuple(one.sample_id for one in samples)
            await hand.tell(StepDone(consumer="rank-0", step=1, version=1, sample_ids=ids))
            await asyncio.sleep(100)
            assert "the outside trainer to write weights: it is at version 1" in hand.world.scheduler.describe_waiting()

    run_in_virtual_time(main())


def test_a_request_to_stop_that_nobody_can_answer_is_answered_for() -> None:
    async def main() -> None:
        hand = Hand()
        async with hand:
            hand.world.stream.lose("rank-0", "died")
            await asyncio.sleep(1)
            await hand.world.request_stop(RunStatus.CANCELLED, "Ctrl-C")
            ended = await hand.running
            assert ended.status is RunStatus.CANCELLED
            assert "no rank of the trainer was there" in ended.reason

    run_in_virtual_time(main())


def test_no_trainer_makes_a_success_of_a_run_that_failed() -> None:
    async def main() -> None:
        async with Hand() as hand:
            await hand.world.request_stop(RunStatus.FAILED, "a judge is gone")
            await hand.tell(TrainingOver(consumer="rank-0", status=RunStatus.FINISHED, reason="all well"))
            ended = await hand.running
            assert ended.status is RunStatus.FAILED
            assert "a judge is gone" in ended.reason

    run_in_virtual_time(main())
