"""Ports for those who must be told theirs before they listen."""

from __future__ import annotations

import contextlib
import random
import socket

from tailrace.errors import SettingsError

_PORTS = range(20_000, 32_000)
"""Below those that the system gives to whoever asks for any: between choice and use it would give a chosen one away."""
_CHOICE = random.SystemRandom()
"""Not the `random` that trainers seed: two runs of the same seed would choose the same ports at the same time."""


def free_port(host: str = "127.0.0.1", count: int = 1) -> int:
    """The first of so many in a row that nobody listens at. Raises `SettingsError`."""
    for port in _CHOICE.sample(range(_PORTS.start, _PORTS.stop - count), 100):
        with contextlib.ExitStack() as tried, contextlib.suppress(OSError):
            for one in range(port, port + count):
                tried.enter_context(socket.socket()).bind((host, one))
            return port
    raise SettingsError(f"no {count} ports in a row are free at {host} ({_PORTS.start} to {_PORTS.stop - 1})")
