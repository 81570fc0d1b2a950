"""Real Redis servers for tests, and what can happen to one."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import RedisConnection, Reply
from tailrace.transport.redis.server import PROGRAM, RedisServer
from tailrace.transport.redis.streams import Origin

needs_redis = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}: make test-system")


@contextlib.contextmanager
def redis_server(folder: Path, *, keeps_data: bool = False) -> Iterator[RedisServer]:
    """One that is gone afterwards."""
    folder.mkdir(exist_ok=True)
    server = RedisServer(folder, keeps_data=keeps_data)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def place_of(server: RedisServer, *, epoch: str = "this-epoch", run: str = "", outage_s: float = 60.0) -> RedisPlace:
    """Streams of a run that no other test has."""
    return RedisPlace(server.url, Origin(run or uuid.uuid4().hex, epoch), outage_s)


def ask(server: RedisServer, *command: str) -> Reply:
    """An operator's command."""
    with contextlib.closing(RedisConnection(server.url)) as connection:
        return connection.one(*command)
