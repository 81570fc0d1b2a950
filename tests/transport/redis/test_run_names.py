"""Promises of a run's name: one start of a run has it at a time, and what one removes is its own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest

from tailrace.errors import SettingsError, TransportError
from tailrace.transport.redis import run_names
from tailrace.transport.redis.channels import RedisChannel, RedisPlace
from tailrace.transport.redis.connection import RedisConnection
from tailrace.transport.redis.leases import Attempt, Lease
from tailrace.transport.redis.run_names import own_run_name
from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import ask, needs_redis, place_of, told

pytestmark = needs_redis

PATIENCE_S = 60.0


def start_of(server: RedisServer, epoch: str) -> RedisPlace:
    return place_of(server, run="run", epoch=epoch)


async def until_held(server: RedisServer, place: RedisPlace) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(ask, server, "EXISTS", place.owner_key) == 0:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def test_a_second_run_of_a_name_is_refused_and_told_who_has_it(server: RedisServer) -> None:
    first, second = start_of(server, "first"), start_of(server, "second")
    async with own_run_name(first, "process 7 on alpha", lease_s=4.0):
        with pytest.raises(
            SettingsError, match=r"another run called 'run' in Redis at redis://127.* 'tailrace'"
        ) as told:
            async with own_run_name(second, "process 8 on beta", lease_s=4.0):
                raise AssertionError("it has the name, too")
    assert "is going on (process 7 on alpha)" in str(told.value)
    assert "choose another --name or another transport.redis.prefix, or wait" in str(told.value)


async def test_runs_of_other_names_and_prefixes_go_on_beside_it(server: RedisServer) -> None:
    first = start_of(server, "first")
    others = [
        place_of(server, run="other", epoch="second"),
        RedisPlace(server.url, start_of(server, "third").origin, prefix="team"),
    ]
    async with AsyncExitStack() as stack:
        for place in (first, *others):
            await stack.enter_async_context(own_run_name(place, "somebody"))


async def test_a_name_is_renewed_again_and_again(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_names, "RENEWALS", 240)  # every 0.25 s, and nobody is late by a minute
    place = start_of(server, "first")
    with contextlib.closing(RedisConnection(server.url)) as connection:
        another = Lease(connection, place.owner_key, "another", 60.0)
        async with asyncio.timeout(PATIENCE_S), own_run_name(place, "somebody", lease_s=60.0):
            for _ in range(3):
                await asyncio.to_thread(ask, server, "PEXPIRE", place.owner_key, "30000")
                while (attempt := await asyncio.to_thread(another.attempt)) is not Attempt.RENEWED:
                    assert attempt is Attempt.HELD
                    await asyncio.sleep(0.02)


async def test_a_name_is_given_back_at_the_end_and_on_failure(server: RedisServer) -> None:
    first, second = start_of(server, "first"), start_of(server, "second")
    async with own_run_name(first, "somebody"):
        assert told(server, "GET", first.owner_key) == b"first somebody"

    async def fail() -> None:
        async with own_run_name(second, "somebody"):
            assert told(server, "GET", first.owner_key) == b"second somebody"
            raise EOFError

    with pytest.raises(EOFError):
        await fail()
    assert ask(server, "EXISTS", first.owner_key) == 0


HOLDING = """
import asyncio, sys
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.run_names import own_run_name
from tailrace.transport.redis.streams import Origin

async def hold():
    async with own_run_name(RedisPlace(sys.argv[1], Origin("run", "killed")), "process 7 on alpha", lease_s=2.0):
        print("held", flush=True)
        await asyncio.sleep(3600)

asyncio.run(hold())
"""


async def test_the_name_of_a_run_that_was_killed_is_waited_for(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDING, server.url, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"held\n"
    process.kill()
    await process.wait()
    place = start_of(server, "resumed")
    async with asyncio.timeout(PATIENCE_S), own_run_name(place, "somebody", lease_s=2.0):
        assert told(server, "GET", place.owner_key) == b"resumed somebody"
    assert "waiting for the name of a run called 'run' in Redis" in caplog.text
    assert "process 7 on alpha has it, and loses it within 2 s if it was killed" in caplog.text


async def test_a_name_that_redis_forgot_is_taken_again(server: RedisServer) -> None:
    place = start_of(server, "first")
    async with own_run_name(place, "somebody", lease_s=1.0):
        await asyncio.to_thread(ask, server, "FLUSHALL")
        await until_held(server, place)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await until_held(server, place)
        assert told(server, "GET", place.owner_key) == b"first somebody"


async def test_a_run_whose_name_another_took_meanwhile_fails_and_takes_nothing_back(server: RedisServer) -> None:
    place = start_of(server, "first")
    async with asyncio.timeout(PATIENCE_S), own_run_name(place, "somebody", lease_s=1.0):
        ask(server, "SET", place.owner_key, "second process 8 on beta", "PX", "60000")
        with pytest.raises(TransportError, match=r"lost its name in Redis to another one \(process 8 on beta\)"):
            await place.watch()
    assert told(server, "GET", place.owner_key) == b"second process 8 on beta"


def test_what_earlier_starts_left_is_removed_and_the_name_stays(server: RedisServer) -> None:
    place = start_of(server, "this")
    for key in (place.owner_key, "tailrace:run:old:batches-0:to", "tailrace:other:e:batches-0:to"):
        ask(server, "SET", key, "there")
    place.remove_keys()
    left = ask(server, "KEYS", "*")
    assert isinstance(left, list)
    assert {*map(bytes, left)} == {b"tailrace:run:owner", b"tailrace:other:e:batches-0:to"}  # type: ignore[arg-type]


async def test_a_start_of_a_run_that_lost_its_name_trims_nothing_of_the_next_one(server: RedisServer) -> None:
    """It was stopped, or its machine cut off, for longer than its lease, and goes on before it notices."""
    got: list[bytes] = []
    changed = asyncio.Event()

    def hear(message: bytes) -> None:
        got.append(message)
        changed.set()

    def end(place: RedisPlace, *, bind: bool) -> RedisChannel:
        return RedisChannel(
            place,
            place.address("batches"),
            bind=bind,
            on_message=hear,
            changed=asyncio.Event(),
            peer="other",
            keeps=True,
        )

    async def sent(channel: RedisChannel, place: RedisPlace, *messages: bytes) -> None:
        for message in messages:
            channel.send(message)
        key = place.address("batches").removeprefix("redis-stream:") + ":to"
        while await asyncio.to_thread(ask, server, "XLEN", key) != channel.num_sent:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)

    old, new = start_of(server, "old"), start_of(server, "new")
    async with asyncio.timeout(PATIENCE_S):
        stale, sender = end(old, bind=True), end(new, bind=True)
        await sent(sender, new, b"1", b"2", bytes(3 << 20))
        await sent(stale, old, b"a", b"b", bytes(4 << 20))
        stale.release(stale.num_sent)
        await stale.close()
        receiver = end(new, bind=False)
        while len(got) < 3:
            changed.clear()
            await changed.wait()
        assert got == [b"1", b"2", bytes(3 << 20)]
        await sender.close()
        await receiver.close()
