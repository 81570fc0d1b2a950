"""Redis by TLS, with an authority, a user and a password in the URL: all goes as without, or what is wrong is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import SettingsError
from tailrace.records import SamplesDropped
from tailrace.transport.redis import connection
from tailrace.transport.redis.connection import require_redis
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver
from tests.support.fed_runs import FedRun, feed_samples
from tests.support.redis_servers import TlsServer, ask, make_certificates, needs_openssl, needs_redis
from tests.transport.redis.test_outages import queue

pytestmark = [needs_redis, needs_openssl]

RIGHTS = ("~tailrace:*", "+@string", "+@keyspace", "+@stream", "+@connection", "+info")
"""What docs/streams.md asks for."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    server = TlsServer(tmp_path / "redis")
    server.start()
    ask(server, "ACL", "SETUSER", "trainer", "on", ">p@ss", *RIGHTS)
    yield server
    server.kill()


def url_of(server: TlsServer, authority: Path | None = None, user: str = "trainer:p%40ss") -> str:
    return f"rediss://{user}@{server.address(authority or server.authority)}"


async def test_samples_and_reports_go_by_it(server: TlsServer) -> None:
    run, sent = FedRun(server, url=url_of(server)), feed_samples(5)
    try:
        await run.sender.offer(sent)
        rank = await asyncio.to_thread(RedisSampleReceiver, url_of(server), "run", "trainer")
        samples = await asyncio.to_thread(rank.pull, 5)
        assert isinstance(samples, list)
        assert [one.sample_id for one in samples] == [one.sample_id for one in sent[: len(samples)]]
        dropped = SamplesDropped(consumer="trainer", sample_ids=(sent[0].sample_id,), reason="so")
        await asyncio.to_thread(rank.report, dropped)
        assert await run.hears(SamplesDropped) == dropped
        await asyncio.to_thread(rank.leave)
    finally:
        await run.close()


async def test_batches_go_by_it_and_outlive_what_was_forgotten(server: TlsServer) -> None:
    async with queue(server, url=url_of(server)) as run:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.send_all())
            for rank in range(len(run.ranks)):
                tasks.create_task(run.train(rank))
            await run.train_until(3)
            await asyncio.to_thread(ask, server, "FLUSHALL")
        assert all(len(steps) == len({*steps}) for steps in run.trained)


def test_another_authority_is_refused_by_name(server: TlsServer, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"TLS as transport\.redis\.url says.*certificate verify failed") as refused:
        require_redis(url_of(server, other))
    assert refused.value.key == ("transport", "redis", "url")
    assert "p%40ss" not in str(refused.value)
    with pytest.raises(SettingsError, match="certificate verify failed"):
        RedisSampleReceiver(url_of(server, other), "run", "trainer")


def test_an_authority_that_is_not_there_is_refused(
    server: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    with pytest.raises(SettingsError, match=r"TLS as transport\.redis\.url says|by rediss://"):
        require_redis(url_of(server, tmp_path / "nowhere"))


def test_a_certificate_of_another_name_is_refused(server: TlsServer) -> None:
    with pytest.raises(SettingsError, match="certificate verify failed"):
        require_redis(url_of(server).replace("127.0.0.1", "localhost"))


def test_a_wrong_password_is_refused_by_tls_too(server: TlsServer) -> None:
    with pytest.raises(SettingsError, match="refuses this user or password"):
        require_redis(url_of(server, user="trainer:wrong"))


def test_an_address_without_tls_is_refused(server: TlsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    with pytest.raises(SettingsError, match="by redis://"):
        require_redis(url_of(server).replace("rediss", "redis").partition("?")[0])
