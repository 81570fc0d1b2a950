"""What steps sampled, handed to an event loop in order, a millisecond of its readers' work for each of its turns.

    engine's thread ── one wake-up per step ──→ waiting ─→ some ─→ (others have a turn) ─→ some more ...

A step may sample a token of a thousand requests whose listeners each write to a client: all of them at once would hold
the loop for longer than a step takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tailrace.generation.completions import WORK_AT_ONCE
from tailrace.generation.engine_thread.handover import post


class Delivery(Protocol):
    """Something for one caller."""

    def deliver(self) -> int:
        """Called on its event loop; the work that it makes there, in short replies."""


class DeliveryQueue:
    """Of one event loop. `put` is the engine's thread's, all else the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Delivery] = deque()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these after all that was put before."""
        post(self._loop, self._take, deliveries)

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        is_handing_out = bool(self._waiting)
        self._waiting.extend(deliveries)
        if not is_handing_out:
            self._hand_out()

    def _hand_out(self) -> None:
        work = 0
        try:
            while self._waiting and work < WORK_AT_ONCE:
                work += self._waiting.popleft().deliver()
        finally:
            if self._waiting:
                self._loop.call_soon(self._hand_out)
