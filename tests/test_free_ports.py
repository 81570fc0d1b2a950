"""Ports that are chosen before anybody listens at them."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import pytest

from tailrace import free_ports
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """Have no other ports than these."""
    return lambda ports: monkeypatch.setattr(free_ports, "_PORTS", ports)


def test_so_many_in_a_row_are_free_where_one_is_taken(only: Callable[[range], None]) -> None:
    first = free_port(count=120)
    only(range(first, first + 120))
    with socket.create_server(("127.0.0.1", first + 60)):
        for _ in range(20):
            chosen = free_port(count=3)
            assert first + 60 not in range(chosen, chosen + 3)


def test_processes_of_the_same_seed_choose_others() -> None:
    chosen = set()
    for _ in range(3):
        random.seed(5)
        chosen.add(free_port())
    assert len(chosen) > 1


def test_none_that_is_free_is_told(only: Callable[[range], None]) -> None:
    first = free_port(count=210)
    only(range(first, first + 210))
    with socket.create_server(("127.0.0.1", first + 105)), pytest.raises(SettingsError, match="no 110 ports in a row"):
        free_port(count=110)  # the middle one is in any so many
