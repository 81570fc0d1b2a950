"""The client of a trainer outside, over a real Redis: what it is handed, and what a run hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from tailrace.errors import DataError, PeerGone, SettingsError
from tailrace.feed import Feed, FeedPlace, denominators
from tailrace.free_ports import free_port
from tailrace.records import (
    CheckpointSaved,
    ConsumerLost,
    RunStatus,
    SampleId,
    SamplesDropped,
    SamplesTaken,
    SamplesWanted,
    StepDone,
    StopRequested,
    StreamedSample,
    TrainingBegan,
    TrainingOver,
    WeightsWritten,
)
from tailrace.transport.redis import connection
from tailrace.transport.redis.feed_place import FEED_FILE
from tailrace.transport.redis.sample_messages import FeedKeys, OpenFeed
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.samples.codec import SCHEMA
from tests.support.fed_runs import PATIENCE_S, FedRun, as_received, feed_samples
from tests.support.redis_servers import ask, needs_redis, redis_server

ResultT = TypeVar("ResultT")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def run(server: RedisServer) -> AsyncIterator[FedRun]:
    run = FedRun(server)
    yield run
    await run.close()


async def trained(work: Callable[[], ResultT]) -> ResultT:
    """What a trainer does, off the event loop of the run."""
    return await asyncio.wait_for(asyncio.to_thread(work), PATIENCE_S)


@needs_redis
async def test_a_trainer_takes_steps_of_its_own_size_and_ends_the_run(
    server: RedisServer, run: FedRun, tmp_path: Path
) -> None:
    sent = feed_samples(7)

    def train() -> list[list[SampleId]]:
        steps = []
        with Feed(FeedPlace(server.url, "run"), step=4, version=3) as feed:
            for step, size in enumerate((3, 1, 2), start=5):
                samples = feed.pull(size)
                steps.append([one.sample_id for one in samples])
                feed.step_done(step, samples, version=step - 1, weights=tmp_path / f"{step}", metrics={"loss": 1.0})
            feed.checkpoint_saved(6, "somewhere")
            feed.drop(feed.pull(1), "too_long")
        return steps

    training = asyncio.create_task(trained(train))
    for one in sent:  # in drips: a pull waits until it has all that it asked for
        await run.sender.offer([one])
    steps = await training
    assert steps == [[one.sample_id for one in sent[start:end]] for start, end in ((0, 3), (3, 4), (4, 6))]
    await run.hears(ConsumerLost)
    told = [report for report in run.told if not isinstance(report, SamplesTaken | SamplesWanted)]
    began, *rest, dropped, over, _left = told[1:]
    assert began == TrainingBegan(consumer="rank-0", step=4, version=3)
    for step, written, done in zip((5, 6, 7), rest[0:6:2], rest[1:6:2], strict=True):
        assert written == WeightsWritten(consumer="rank-0", version=step - 1, folder=str(tmp_path / f"{step}"))
        ids = tuple(steps[step - 5])
        metrics = {"loss": 1.0}
        assert done == StepDone(consumer="rank-0", step=step, version=step - 1, sample_ids=ids, metrics=metrics)
    assert rest[6] == CheckpointSaved(consumer="rank-0", step=6, path="somewhere")
    assert dropped == SamplesDropped(consumer="rank-0", sample_ids=(sent[6].sample_id,), reason="too_long")
    assert isinstance(over, TrainingOver)
    assert over.status is RunStatus.FINISHED
    wanted = [report.samples for report in run.told if isinstance(report, SamplesWanted)]
    assert wanted == [3, 1, 2, 1]


@needs_redis
async def test_a_rank_that_cannot_begin_gives_its_name_back(server: RedisServer, run: FedRun) -> None:
    place = FeedPlace(server.url, "run")

    def train() -> None:
        with pytest.raises(SettingsError, match="takes weights from folders"):
            Feed(place, weights={})
        with Feed(place):
            pass

    await trained(train)
    await run.hears(TrainingOver)


@needs_redis
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no such loss"), RunStatus.FAILED, "ValueError: no such loss"),
        (KeyboardInterrupt(), RunStatus.CANCELLED, "interrupted"),
    ],
    ids=["an error", "ctrl-c"],
)
async def test_a_trainer_that_raises_writes_the_terminal_record(
    server: RedisServer, run: FedRun, error: BaseException, status: RunStatus, reason: str
) -> None:
    def train() -> None:
        with contextlib.suppress(type(error)), Feed(FeedPlace(server.url, "run")):
            raise error

    await trained(train)
    assert await run.hears(TrainingOver) == TrainingOver(consumer="rank-0", status=status, reason=reason)


@needs_redis
async def test_a_trainer_that_is_asked_to_stop_ends_as_it_is_asked(server: RedisServer, run: FedRun) -> None:
    def train() -> tuple[list[StreamedSample], list[StreamedSample]]:
        with Feed(FeedPlace(server.url, "run")) as feed:
            return feed.pull(2), feed.pull(1)

    training = asyncio.create_task(trained(train))
    await run.sender.offer(feed_samples(1))
    await run.hears(SamplesTaken)
    stop = StopRequested(epoch="epoch", role="orchestrator", status=RunStatus.CANCELLED, reason="Ctrl-C")
    await run.sender.request_stop(stop)
    assert await training == ([], [])
    assert await run.hears(TrainingOver) == TrainingOver(consumer="rank-0", status=RunStatus.CANCELLED, reason="Ctrl-C")


@needs_redis
async def test_a_rank_that_does_not_lead_only_leaves(server: RedisServer, run: FedRun) -> None:
    def train() -> int:
        with Feed(FeedPlace(server.url, "run"), rank=1) as feed:
            return len(feed.pull(2))

    await run.sender.offer(feed_samples(2))
    assert await trained(train) == 2
    lost = await run.hears(ConsumerLost)
    assert (lost.consumer, lost.reason) == ("rank-1", "left")
    assert not [report for report in run.told if isinstance(report, TrainingBegan | TrainingOver)]


@needs_redis
async def test_a_run_that_ends_first_says_why(server: RedisServer, run: FedRun) -> None:
    def train() -> None:
        with Feed(FeedPlace(server.url, "run")) as feed:
            feed.pull(1)

    training = asyncio.create_task(trained(train))
    await run.hears(SamplesWanted)
    await run.close("step 3 was told of twice")
    with pytest.raises(PeerGone, match="run 'run' ended: step 3 was told of twice"):
        await training


@needs_redis
async def test_a_run_s_folder_tells_where_its_samples_are(server: RedisServer, run: FedRun, tmp_path: Path) -> None:
    (tmp_path / FEED_FILE).write_text(json.dumps({"url": server.url, "run": "run", "prefix": "tailrace"}))

    def train() -> int:
        with Feed(tmp_path) as feed:
            return len(feed.pull(1))

    await run.sender.offer(feed_samples(1))
    assert await trained(train) == 1


@needs_redis
async def test_a_folder_that_a_killed_run_left_is_read_again_until_the_next_one_is_there(
    server: RedisServer,
    run: FedRun,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tell(url: str) -> None:
        (tmp_path / FEED_FILE).write_text(json.dumps({"url": url, "run": "run"}))

    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    tell(f"redis://127.0.0.1:{free_port()}")
    training = asyncio.create_task(trained(lambda: take_one(tmp_path)))
    await says(caplog, "waiting for the run for up to 300 s: no Redis answers at", training)
    tell(server.url)
    await run.sender.offer(feed_samples(1))
    assert await training == 1


@needs_redis
async def test_a_run_that_goes_on_elsewhere_than_the_killed_one_is_found_there(
    server: RedisServer, run: FedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its Redis answers, and nobody feeds anything there any more."""

    def tell(prefix: str) -> None:
        (tmp_path / FEED_FILE).write_text(json.dumps({"url": server.url, "run": "run", "prefix": prefix}))

    tell("before")
    training = asyncio.create_task(trained(lambda: take_one(tmp_path)))
    await says(caplog, "waiting for the run for up to 300 s: no run called 'run' feeds a trainer", training)
    tell("tailrace")
    await run.sender.offer(feed_samples(1))
    assert await training == 1


@needs_redis
async def test_the_start_of_a_run_that_was_killed_is_left_for_the_next_one(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    left = msgspec.json.encode(OpenFeed(SCHEMA, "killed", 1.0))
    ask(server, "SET", FeedKeys("tailrace", "run").open, left, "PX", 1000)
    training = asyncio.create_task(trained(lambda: take_one(FeedPlace(server.url, "run"))))
    await says(caplog, "waiting for the run for up to 300 s: run 'run' fell silent", training)
    run = FedRun(server)
    await run.sender.offer(feed_samples(1))
    assert await training == 1
    await run.close()


def take_one(where: Path | FeedPlace) -> int:
    with Feed(where) as feed:
        return len(feed.pull(1))


async def says(caplog: pytest.LogCaptureFixture, text: str, training: asyncio.Task[int]) -> None:
    """Wait for it."""
    while text not in caplog.text:
        assert not training.done(), await training
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("content", [None, "", "[]", '{"url": 5}', "\xff" * 70000])
def test_a_folder_that_does_not_tell_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FEED_FILE).write_text(content)
    with pytest.raises(DataError, match=FEED_FILE):
        Feed(tmp_path, patience_s=0.1)


def test_an_address_is_not_taken_for_a_folder() -> None:
    with pytest.raises(SettingsError, match=r"by Feed\(FeedPlace\(URL, run=NAME\)\)"):
        Feed("redis://:secret@127.0.0.1:1")


def received(count: int) -> list[StreamedSample]:
    return as_received(feed_samples(count))


def test_denominators_are_of_all_ranks() -> None:
    ranks = [received(4)[:1], received(4)[1:], []]
    counts = [[sum(int(one.loss_mask.sum()) for one in rank), len(rank)] for rank in ranks]
    whole = np.sum(counts, axis=0).tolist()

    def sum_over_ranks(own: list[int]) -> list[int]:
        assert own in counts
        return list(whole)

    for rank in ranks:
        found = denominators(rank, sum_over_ranks)
        assert [found.loss_tokens, found.samples] == whole
    assert [denominators(ranks[0]).loss_tokens, denominators(ranks[0]).samples] == counts[0]


def test_the_client_imports_neither_torch_nor_what_runs_an_orchestrator() -> None:
    program = "import sys, tailrace.feed; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("tailrace.")}
    assert rooms == {"errors", "extras", "feed", "free_ports", "guards", "records", "transport", "urls"}
    assert not {"torch", "transformers", "zmq", "pydantic", "redis"} & {*loaded}
