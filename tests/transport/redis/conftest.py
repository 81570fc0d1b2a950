from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_servers import ReplicatedServer, redis_server


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReplicatedServer]:
    """One of this test's own, which it may stop. With the parameter True it keeps its data."""
    with redis_server(tmp_path / "redis", keeps_data=getattr(request, "param", False)) as server:
        yield server
