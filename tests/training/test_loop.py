"""The trainer's loop trains what it is sent, publishes before it reports, and always says how it ended."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tailrace.errors import CheckpointError, CorruptData, Diverged, ModelError, PeerGone, TransportError
from tailrace.records import (
    Batch,
    CheckpointWritten,
    Event,
    ModelStateDictPublished,
    ModelStateDictRef,
    RunStatus,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.training.checkpoints.snapshots import Snapshot
from tailrace.training.loop import TrainerPlan, run_trainer
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import StepResult, Trainer
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.training.tiny import build_batch

EPOCH = "epoch-1"


class GivenBatches:
    """The trainer's end of a queue of batches that nobody planned."""

    def __init__(self, capacity: int) -> None:
        self._waiting: asyncio.Queue[Batch | TransportError] = asyncio.Queue()
        self._room = asyncio.Semaphore(capacity)

    async def send(self, batch: Batch) -> None:
        await self._room.acquire()
        self._waiting.put_nowait(batch)

    async def receive(self) -> Batch:
        if isinstance(batch := await self._waiting.get(), TransportError):
            raise batch
        return batch

    async def acknowledge(self, step: int) -> None:
        self._room.release()

    async def close(self) -> None:
        self._waiting.put_nowait(PeerGone("the batch queue is closed"))

    def damage(self) -> None:
        """The next batch is not what was sent."""
        self._waiting.put_nowait(CorruptData("batch-1 is damaged"))


class World:
    """A trainer's loop with everything around it in memory."""

    def __init__(self, model_folder: Path, checkpoints: Path) -> None:
        self.queue = GivenBatches(capacity=8)
        self.store = MemoryModelStateDictStore()
        self.log = MemoryEventLog(EPOCH)
        self.model_name = str(model_folder)
        self.checkpoints = checkpoints
        self.trainer: Trainer | None = None
        self.kind: type[Trainer] = Trainer
        self.thread: threading.Thread | None = None

    def run(
        self,
        max_steps: int = 3,
        resume_from: Path | None = None,
        checkpoint_every_s: float = 300.0,
        restarts_ranks: bool = False,
        **settings: object,
    ) -> asyncio.Task[TrainerEnded]:
        def make_trainer() -> Trainer:
            self.thread = threading.current_thread()
            self.trainer = self.kind(
                TrainerSettings.model_validate({"learning_rate": 1e-3} | settings),
                model_name=self.model_name,
                max_steps=max_steps,
                max_staleness=max_steps,
            )
            return self.trainer

        plan = TrainerPlan(
            epoch=EPOCH,
            checkpoints=self.checkpoints,
            resume_from=resume_from,
            checkpoint_every_s=checkpoint_every_s,
            restarts_ranks=restarts_ranks,
        )
        return asyncio.create_task(run_trainer(make_trainer, self.queue, self.store, self.log, plan))

    async def send(self, *batches: Batch) -> None:
        for batch in batches:
            await self.queue.send(batch)

    async def until(self, kind: type[Event]) -> Event:
        async for event in self.log.follow():
            if isinstance(event, kind):
                return event
        raise AssertionError(f"the log ended without {kind}")

    async def request_stop(self, status: RunStatus = RunStatus.FINISHED) -> None:
        await self.log.append(StopRequested(epoch=EPOCH, role="scheduler", status=status, reason="no tasks left"))

    async def events(self) -> list[Event]:
        """Those logged so far."""
        found: list[Event] = []

        async def follow() -> None:
            async for event in self.log.follow():
                found.append(event)  # noqa: PERF401 - it never ends

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)  # a follower gets what is there at once
        following.cancel()
        await asyncio.wait([following])
        return found

    async def kinds(self) -> list[str]:
        return [type(event).__name__ for event in await self.events()]


@pytest.fixture
async def world(model_folder: Path, tmp_path: Path) -> AsyncIterator[World]:
    yield World(model_folder, tmp_path / "checkpoints")
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("trainer:")]
    assert not left, "the loop left tasks behind"


async def test_a_run_publishes_before_it_reports_and_ends_by_its_own_event(world: World) -> None:
    running = world.run(max_steps=2)
    await world.send(build_batch(step=1), build_batch(step=2, version=0))
    ended = await running
    assert ended == TrainerEnded(epoch=EPOCH, status=RunStatus.FINISHED, step=2, reason="max_steps = 2 reached")
    step = ["ModelStateDictPublished", "StepTrained"]
    assert await world.kinds() == ["TrainerStarted", *step, *step, "CheckpointWritten", "TrainerEnded"]
    assert world.thread is not threading.current_thread()


async def test_what_is_published_is_what_was_trained(world: World) -> None:
    running = world.run(max_steps=1)
    await world.send(build_batch(step=1))
    await running
    published = next(event for event in await world.events() if isinstance(event, ModelStateDictPublished))
    assert world.trainer is not None
    with world.store.open(published.ref) as tensors:
        assert tensors.version == 1
        for name, tensor in world.trainer.snapshot().wait().items():
            assert torch.equal(tensors[name], tensor)


async def test_publishing_counts_the_time_in_which_weights_are_converted(world: World) -> None:
    class ConvertingTrainer(Trainer):
        def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32", *, stays: bool = False) -> Snapshot:
            time.sleep(0.2)
            return super().snapshot(dtype, stays=stays)

    world.kind = ConvertingTrainer
    running = world.run(max_steps=1)
    await world.send(build_batch(step=1))
    trained = await world.until(StepTrained)
    await running
    assert isinstance(trained, StepTrained)
    assert trained.metrics["training/publish_s"] >= 0.2


def detaching(copied: threading.Event) -> type[Trainer]:
    """A trainer whose snapshots are copies, as a GPU's are; they are complete once `copied` is set."""

    class Copied:
        def synchronize(self) -> None:
            assert copied.wait(60)

    class DetachingTrainer(Trainer):
        def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32", *, stays: bool = False) -> Snapshot:
            taken = super().snapshot(dtype, stays=stays)
            weights = {name: weight.clone() for name, weight in taken.weights.items()}
            return Snapshot(weights, taken.version, Copied())  # type: ignore[arg-type]

    return DetachingTrainer


async def test_the_next_step_computes_while_a_detached_snapshot_is_published_and_is_reported_after_it(
    world: World,
) -> None:
    copied = threading.Event()
    world.kind = detaching(copied)
    running = world.run(max_steps=2)
    await world.send(build_batch(step=1), build_batch(step=2, version=0))
    async with asyncio.timeout(60):
        while world.trainer is None or world.trainer.step < 2:  # noqa: ASYNC110 - a thread's number has no event
            await asyncio.sleep(0.01)
    assert await world.kinds() == ["TrainerStarted"]
    copied.set()
    await running
    step = ["ModelStateDictPublished", "StepTrained"]
    assert await world.kinds() == ["TrainerStarted", *step, *step, "CheckpointWritten", "TrainerEnded"]
    published = [event.ref.version for event in await world.events() if isinstance(event, ModelStateDictPublished)]
    assert published == [1, 2]


class FullStore(MemoryModelStateDictStore):
    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        raise TransportError("no room")


@pytest.mark.parametrize("is_detached", [False, True])
async def test_weights_that_cannot_be_published_end_training_even_if_no_batch_comes(
    world: World, is_detached: bool
) -> None:
    world.store = FullStore()
    copied = threading.Event()
    copied.set()
    world.kind = detaching(copied) if is_detached else Trainer
    running = world.run(max_steps=3)
    await world.send(build_batch(step=1))
    with pytest.raises(TransportError, match="no room"):
        await asyncio.wait_for(running, 60)
    assert (await world.kinds())[-1] == "TrainerEnded"


async def test_a_trained_batch_is_given_back(world: World) -> None:
    world.queue = GivenBatches(capacity=1)
    running = world.run(max_steps=3)
    async with asyncio.timeout(60):
        await world.send(*(build_batch(step=step) for step in (1, 2, 3)))
    await running


async def test_a_skipped_step_makes_no_version(world: World) -> None:
    running = world.run(max_steps=2)
    await world.send(build_batch(step=1, advantages=[math.nan] * 4), build_batch(step=2))
    await running
    events = await world.events()
    assert StepSkipped(epoch=EPOCH, step=1, version=0, reason="non_finite") in events
    assert [event.version for event in events if isinstance(event, StepTrained)] == [1]


async def test_a_version_that_was_there_before_is_published_though_its_step_is_skipped_now(world: World) -> None:
    running = world.run(max_steps=2)
    again = dataclasses.replace(build_batch(step=1, advantages=[math.nan] * 4), version_after=1)
    await world.send(again, build_batch(step=2, version=1))
    await running
    kinds = ["ModelStateDictPublished", "StepSkipped", "ModelStateDictPublished", "StepTrained"]
    assert await world.kinds() == ["TrainerStarted", *kinds, "CheckpointWritten", "TrainerEnded"]
    assert StepSkipped(epoch=EPOCH, step=1, version=1, reason="non_finite") in await world.events()


async def test_a_stop_request_wakes_the_wait_for_a_batch_and_saves(world: World) -> None:
    running = world.run(max_steps=5)
    await world.send(build_batch(step=1))
    await world.until(StepTrained)
    await world.request_stop(RunStatus.CANCELLED)
    ended = await running
    assert (ended.status, ended.step, ended.reason) == (RunStatus.CANCELLED, 1, "scheduler: no tasks left")
    assert (await world.kinds())[-2:] == ["CheckpointWritten", "TrainerEnded"]


async def test_a_stop_request_goes_before_a_batch(world: World) -> None:
    await world.request_stop()
    await world.send(build_batch(step=1))
    ended = await world.run(max_steps=5)
    assert ended.step == 0


async def test_a_divergence_is_reported_and_raised(world: World) -> None:
    running = world.run(max_steps=5, max_nonfinite_steps=1)
    await world.send(build_batch(step=1, advantages=[math.nan] * 4))
    with pytest.raises(Diverged):
        await running
    last = (await world.events())[-1]
    assert isinstance(last, TrainerEnded)
    assert last.status is RunStatus.FAILED
    assert last.error == "Diverged"


async def test_a_model_that_cannot_be_loaded_ends_training_before_it_began(world: World) -> None:
    world.model_name = "./nowhere"
    with pytest.raises(ModelError):
        await world.run()
    assert await world.kinds() == ["TrainerEnded"]


async def test_the_end_of_the_batch_queue_is_a_failure(world: World) -> None:
    running = world.run()
    await world.until(TrainerStarted)
    await world.queue.close()
    with pytest.raises(PeerGone):
        await running
    assert (await world.kinds())[-1] == "TrainerEnded"


async def test_the_end_of_the_batch_queue_ends_no_training_where_the_trainer_is_started_again(world: World) -> None:
    """The connection to who sends batches was lost, as it may be to any rank: they are sent again."""
    running = world.run(restarts_ranks=True)
    await world.until(TrainerStarted)
    await world.queue.close()
    with pytest.raises(PeerGone):
        await running
    assert await world.kinds() == ["TrainerStarted"]


async def test_a_damaged_batch_ends_training_though_the_trainer_is_started_again(world: World) -> None:
    """It lies where it would be read again."""
    running = world.run(restarts_ranks=True)
    await world.until(TrainerStarted)
    world.queue.damage()
    with pytest.raises(CorruptData):
        await running
    last = (await world.events())[-1]
    assert isinstance(last, TrainerEnded)
    assert (last.status, last.reason, last.error) == (RunStatus.FAILED, "batch-1 is damaged", "CorruptData")


async def test_a_log_that_ends_is_a_failure(world: World) -> None:
    running = world.run()
    await world.until(TrainerStarted)
    await world.log.close()
    with pytest.raises(PeerGone):
        await running


async def test_cancellation_is_recorded_once_and_passed_on(world: World) -> None:
    running = world.run()
    await world.until(TrainerStarted)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    ended = [event for event in await world.events() if isinstance(event, TrainerEnded)]
    assert [event.status for event in ended] == [RunStatus.CANCELLED]


async def test_a_cancellation_after_the_end_was_written_for_the_trainer_is_no_error(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    running = world.run()
    await world.until(TrainerStarted)
    await world.log.append(TrainerEnded(epoch=EPOCH, status=RunStatus.FAILED, step=0, reason="a generator failed"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_checkpoint_that_cannot_be_written_is_a_failure_with_its_reason(world: World) -> None:
    world.checkpoints.write_text("a file where the folder should be")
    running = world.run(max_steps=1)
    await world.send(build_batch(step=1))
    with pytest.raises(CheckpointError):
        await running
    last = (await world.events())[-1]
    assert isinstance(last, TrainerEnded)
    assert "cannot be written" in last.reason


async def test_a_run_resumes_from_its_checkpoint_with_version_and_weights(world: World, model_folder: Path) -> None:
    running = world.run(max_steps=2, checkpoint_every_steps=1)
    await world.send(*(build_batch(step=step) for step in (1, 2)))
    await running
    written = [event for event in await world.events() if isinstance(event, CheckpointWritten)]
    assert [event.step for event in written] == [1, 2]

    resumed = World(model_folder, world.checkpoints)
    running = resumed.run(max_steps=2, resume_from=Path(written[0].path))
    await resumed.send(build_batch(step=2))
    await running
    started, published = (await resumed.events())[:2]
    assert started == TrainerStarted(epoch=EPOCH, step=1, version=1)
    assert isinstance(published, ModelStateDictPublished)
    assert published.ref.version == 1
    assert world.trainer is not None
    assert resumed.trainer is not None
    for name, tensor in world.trainer.snapshot().wait().items():
        assert torch.equal(tensor, resumed.trainer.snapshot().wait()[name])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"checkpoint_every_s": 0.0}, [1, 2]),
        ({"checkpoint_every_s": 1e9}, [2]),
        ({"checkpoint_every_s": 0.0, "checkpoint_every_steps": 0}, [2]),
    ],
)
async def test_checkpoints_are_written_every_so_often_by_default(
    world: World, settings: dict[str, Any], steps: list[int]
) -> None:
    running = world.run(max_steps=2, **settings)
    await world.send(*(build_batch(step=step) for step in (1, 2)))
    await running
    assert [event.step for event in await world.events() if isinstance(event, CheckpointWritten)] == steps


async def test_the_event_loop_is_free_while_a_step_computes(world: World) -> None:
    """The step does not end before the loop answers it."""
    loop, answered = asyncio.get_running_loop(), threading.Event()

    class AskingTrainer(Trainer):
        def train_step(self, batch: Batch) -> StepResult:
            loop.call_soon_threadsafe(answered.set)
            assert answered.wait(60), "the event loop was held by the step"
            return super().train_step(batch)

    world.kind = AskingTrainer
    running = world.run(max_steps=1)
    await world.send(build_batch(step=1))
    assert (await running).step == 1
