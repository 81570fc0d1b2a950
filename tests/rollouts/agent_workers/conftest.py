"""Agent workers leave nothing behind, whatever happens to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollouts.agent_workers.played import processes, sockets


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    processes_before, sockets_before = processes(), sockets()
    yield
    assert processes() <= processes_before
    assert sockets() <= sockets_before
