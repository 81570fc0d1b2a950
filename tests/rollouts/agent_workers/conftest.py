"""Agent workers leave nothing behind, whatever happens to them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.rollouts.agent_workers.played import GONE_S, processes, sockets


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    processes_before, sockets_before = processes(), sockets()
    yield
    deadline_s = time.monotonic() + GONE_S
    while (left := (processes() - processes_before, sockets() - sockets_before)) != (set(), set()):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)
