"""Ports that are chosen before anybody listens at them."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Callable, Iterator

import pytest

from tailrace import free_ports
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """Have no other ports than these."""
    return lambda ports: monkeypatch.setattr(free_ports, "_PORTS", ports)


@contextlib.contextmanager
def taken(place: int, count: int) -> Iterator[int]:
    """The first of so many ports, of which somebody listens at this one."""
    while True:
        first = free_port(count=count)
        try:
            server = socket.create_server(("127.0.0.1", first + place))
        except OSError as error:  # another process was quicker
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            with server:
                yield first
            return


def test_so_many_in_a_row_are_free_where_one_is_taken(only: Callable[[range], None]) -> None:
    with taken(60, count=120) as first:
        only(range(first, first + 120))
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
    with taken(105, count=210) as first:  # it is in any 110 of them
        only(range(first, first + 210))
        with pytest.raises(SettingsError, match="no 110 ports in a row"):
            free_port(count=110)
