from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One of this test's own, which it may stop."""
    with redis_server(tmp_path / "redis") as server:
        yield server
