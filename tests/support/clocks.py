"""The clock of a real event loop, moved on: what is due later is due at once, and nobody waits for it."""

from __future__ import annotations

import asyncio

import pytest


async def move_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """By so many seconds until the test is over, and some turns of the loop for those whom that wakes."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + by_s)
    for _ in range(100):
        await asyncio.sleep(0)
