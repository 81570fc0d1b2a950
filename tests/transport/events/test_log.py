"""Promises of every event log, and those of files and of other processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.errors import CorruptData, PeerGone, TransportError
from tailrace.records import Event, RunStatus, StepTrained, StopRequested, TrainerEnded, TrainerStarted
from tailrace.transport.channels import ipc_address
from tailrace.transport.events import log as log_module
from tailrace.transport.events.log import KEPT_OF_STEPS, EventLog, FileEventLog, MemoryEventLog
from tailrace.transport.events.rpc import ConversingEventLogServer, EventLogClient, EventLogServer
from tests.support.event_files import read_events
from tests.support.redis_servers import needs_redis, place_of

EPOCH = "this-epoch"


def trained(step: int, *, epoch: str = EPOCH, loss: float = 0.5) -> StepTrained:
    return StepTrained(epoch=epoch, step=step, version=step, metrics={"loss": loss})


@dataclass
class Log:
    """A log to use, and the way to end it for everyone."""

    log: EventLog
    end: Callable[[], object]


@pytest.fixture(params=["memory", "file", "client", pytest.param("redis", marks=needs_redis)])
async def events(request: pytest.FixtureRequest, sockets: Path, tmp_path: Path) -> AsyncIterator[Log]:
    owned = MemoryEventLog(EPOCH) if request.param == "memory" else FileEventLog(tmp_path / "events.jsonl", EPOCH)
    if request.param in ("memory", "file"):
        yield Log(owned, owned.close)
        await owned.close()
        return
    server: EventLogServer | ConversingEventLogServer
    if request.param == "redis":
        redis = place_of(request.getfixturevalue("shared_redis"), epoch=EPOCH)
        address = redis.address("events")
        server = ConversingEventLogServer(owned, [address], redis.open_channel)
        client = EventLogClient(address, EPOCH, redis.open_channel)
    else:
        server = EventLogServer(owned, ipc_address(sockets, "events"))
        client = EventLogClient(ipc_address(sockets, "events"), EPOCH)

    async def end() -> None:
        await owned.close()
        await server.close()

    yield Log(client, end)
    await client.close()
    await end()


async def collect(log: EventLog) -> list[Event]:
    return [event async for event in log.follow()]


async def test_a_follower_gets_what_was_logged_before_then_what_comes_then_the_end(events: Log) -> None:
    await events.log.append(trained(1))
    following = asyncio.create_task(collect(events.log))
    await events.log.append(trained(2))
    last = TrainerEnded(epoch=EPOCH, status=RunStatus.FINISHED, step=3, reason="done")
    started = TrainerStarted(epoch=EPOCH, step=3, version=3)
    await events.log.append(started)
    await events.log.append(last)
    await events.end()  # type: ignore[misc]
    assert await following == [trained(1), trained(2), started, last]


async def test_a_follower_is_woken_by_an_append(events: Log) -> None:
    follower = events.log.follow()
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.wait({waiting}, timeout=0.02)
    assert not waiting.done()
    await events.log.append(trained(1))
    assert await waiting == trained(1)


async def test_an_event_of_another_epoch_is_refused(events: Log) -> None:
    with pytest.raises(TransportError, match="another"):
        await events.log.append(trained(1, epoch="another"))
    await events.log.append(trained(2))
    assert await anext(events.log.follow()) == trained(2)


async def test_a_second_terminal_record_is_refused(events: Log) -> None:
    ended = TrainerEnded(epoch=EPOCH, status=RunStatus.CANCELLED, step=0, reason="so")
    both = await asyncio.gather(events.log.append(ended), events.log.append(ended), return_exceptions=True)
    (refused,) = [answer for answer in both if answer is not None]
    assert isinstance(refused, TransportError)
    assert "takes no second one" in str(refused)
    await events.log.append(trained(1))


async def test_a_closed_log_takes_nothing(events: Log) -> None:
    await events.log.close()
    await events.log.close()
    with pytest.raises(TransportError):
        await events.log.append(trained(1))


async def test_a_late_follower_gets_the_newest_steps_and_whatever_says_how_the_run_stands(events: Log) -> None:
    started = TrainerStarted(epoch=EPOCH, step=0, version=0)
    early, late = events.log.follow(), events.log.follow()
    await events.log.append(started)
    assert await anext(early) == started
    count = 2 * KEPT_OF_STEPS
    for step in range(count):
        await events.log.append(trained(step))
    assert [await anext(early) for _ in range(count)] == [trained(step) for step in range(count)]
    newest = [trained(step) for step in range(count - KEPT_OF_STEPS, count)]
    assert [await anext(late) for _ in range(1 + KEPT_OF_STEPS)] == [started, *newest]
    await events.log.append(trained(count))
    assert await anext(late) == await anext(early) == trained(count)


async def test_a_stuck_disk_holds_the_append_but_not_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_write, write = threading.Event(), threading.Event(), os.write

    def stuck(file: int, line: bytes) -> int:
        is_writing.set()
        may_write.wait()
        return write(file, line)

    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    monkeypatch.setattr(os, "write", stuck)
    given_up = asyncio.create_task(log.append(trained(1)))
    behind_it = asyncio.create_task(log.append(trained(2)))
    await asyncio.to_thread(is_writing.wait)  # the loop goes on
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    may_write.set()
    await behind_it
    await log.close()
    assert await collect(log) == read_events(tmp_path / "events.jsonl") == [trained(1), trained(2)]


async def test_a_disk_that_hangs_keeps_the_end_of_a_run_from_nobody_nor_the_log_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write, write = threading.Event(), threading.Event(), os.write

    def stuck(file: int, line: bytes) -> int:
        is_writing.set()
        may_write.wait()
        return write(file, line)

    monkeypatch.setattr(os, "write", stuck)
    monkeypatch.setattr(log_module, "_HANGS_S", 0.05)
    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    following = asyncio.create_task(collect(log))
    hangs = asyncio.create_task(log.append(trained(1)))
    await asyncio.to_thread(is_writing.wait)
    stop = StopRequested(epoch=EPOCH, role="orchestrator", status=RunStatus.FAILED, reason="nothing moved")
    ended = TrainerEnded(epoch=EPOCH, status=RunStatus.FAILED, step=0, reason="nothing moved")
    async with asyncio.timeout(60):
        await log.append(stop)
        await log.append(ended)
        await log.close()
        with pytest.raises(TransportError, match=r"cannot append to the event log .*: its disk hangs"):
            await hangs
        assert await following == [stop, ended]
    may_write.set()
    await asyncio.to_thread(_thread_ended, "tailrace-events")
    assert read_events(tmp_path / "events.jsonl") == [trained(1), stop, ended]


def _thread_ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(60)


@pytest.mark.parametrize("call", ["fstat", "write", "ftruncate"])
async def test_a_disk_that_fails_is_told_to_who_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda file, line: 1)
        disk.setattr(os, call, failing)
        with pytest.raises(TransportError, match=r"cannot append to the event log .*: Input/output error"):
            await log.append(trained(1))
    await log.close()


async def test_users_who_take_all_threads_of_the_loop_hold_no_append(tmp_path: Path) -> None:
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    taken = loop.run_in_executor(None, may_end.wait)
    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    try:
        async with asyncio.timeout(60):
            await log.append(trained(1))
            await log.close()
    finally:
        may_end.set()
        await taken
    assert read_events(tmp_path / "events.jsonl") == [trained(1)]


async def test_a_file_keeps_the_metrics_of_every_step(tmp_path: Path) -> None:
    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    for step in range(40):
        await log.append(trained(step))
    await log.close()
    kept = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, StepTrained)]
    assert len(kept) == 40
    assert all(event.metrics for event in kept)


async def test_a_file_holds_one_json_object_per_event_and_survives_metrics_that_json_has_no_word_for(
    tmp_path: Path,
) -> None:
    log = FileEventLog(tmp_path / "events.jsonl", EPOCH)
    await log.append(trained(1, loss=math.nan))
    await log.append(trained(2))
    await log.close()
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 2
    first, second = read_events(tmp_path / "events.jsonl")
    assert isinstance(first, StepTrained)
    assert math.isnan(first.metrics["loss"])
    assert second == trained(2)


async def test_a_later_epoch_appends_to_the_file_and_does_not_see_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for epoch in ("first", "second"):
        log = FileEventLog(path, epoch)
        await log.append(trained(1, epoch=epoch))
        await log.close()
        assert await collect(log) == [trained(1, epoch=epoch)]
    assert read_events(path) == [trained(1, epoch="first"), trained(1, epoch="second")]


async def test_a_torn_last_line_is_tolerated_and_cut_off_before_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = FileEventLog(path, EPOCH)
    for step in (1, 2):
        await log.append(trained(step))
    await log.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert read_events(path) == [trained(1)]
    log = FileEventLog(path, EPOCH)
    await log.append(trained(3))
    await log.close()
    assert read_events(path) == [trained(1), trained(3)]


async def test_a_damaged_line_of_an_earlier_epoch_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type": "Step\xff\n' + b"x" * 100_000)
    log = FileEventLog(path, EPOCH)
    await log.append(trained(1))
    await log.close()
    damaged, appended = path.read_bytes().splitlines()
    assert damaged == b'{"type": "Step\xff'
    assert b"StepTrained" in appended


def test_any_other_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type": "StepTrained"}\n')
    with pytest.raises(CorruptData, match="line 1"):
        read_events(path)


SERVER_THAT_DIES = """
import asyncio, os, sys
from tailrace.records import StepTrained
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.events.rpc import EventLogServer

async def main():
    log = MemoryEventLog("this-epoch")
    server = EventLogServer(log, sys.argv[1])
    async for event in log.follow():
        if event.step == 3:
            os._exit(9)

asyncio.run(main())
"""


async def test_a_server_that_vanished_is_told_to_whoever_follows_or_appends(sockets: Path) -> None:
    address = ipc_address(sockets, "events")
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER_THAT_DIES, address)
    client = EventLogClient(address, EPOCH)
    following = asyncio.create_task(collect(client))
    for step in (1, 2):
        await client.append(trained(step))
    with contextlib.suppress(PeerGone):  # it may have answered first
        await client.append(trained(3))
    with pytest.raises(PeerGone):
        await following
    with pytest.raises(PeerGone):
        await client.append(trained(4))
    await client.close()
    await server.wait()


async def test_events_of_several_clients_are_seen_by_all_in_one_order(sockets: Path) -> None:
    address = ipc_address(sockets, "events")
    log = MemoryEventLog(EPOCH)
    server = EventLogServer(log, address)
    clients = [EventLogClient(address, EPOCH) for _ in range(3)]
    followers = [asyncio.create_task(collect(client)) for client in clients]
    await asyncio.gather(*(client.append(trained(i * 10 + n)) for n in range(10) for i, client in enumerate(clients)))
    await log.close()
    await server.close()
    seen = [await follower for follower in followers]
    assert len(seen[0]) == 30
    assert seen[0] == seen[1] == seen[2] == await collect(log)
    for client in clients:
        await client.close()


async def test_a_server_that_closes_before_its_log_is_gone(sockets: Path) -> None:
    log = MemoryEventLog(EPOCH)
    server = EventLogServer(log, ipc_address(sockets, "events"))
    client = EventLogClient(ipc_address(sockets, "events"), EPOCH)
    await client.append(trained(1))
    following = asyncio.create_task(collect(client))
    await server.close()
    with pytest.raises(PeerGone):
        await following
    await client.close()
