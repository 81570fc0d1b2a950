from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.transport.channels import create_socket_folder
from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import redis_server


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path short enough for sockets; nothing but sockets may be left in it."""
    folder = create_socket_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for all tests that leave it as it is."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
