"""Whose turn it is to load weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Turns:
    """Lets so many go at once as `at_once` says, in the order in which they ask."""

    def __init__(self, at_once: Callable[[], int]) -> None:
        self._at_once = at_once
        self._going = 0
        self._waiting = dict[asyncio.Future[None], None]()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until fewer go than may at once, of as many as there are now."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        self.give()
        try:
            await turn
            yield
        finally:
            if turn in self._waiting:
                del self._waiting[turn]
            else:  # it had its turn
                self._going -= 1
            self.give()

    def give(self) -> None:
        """To those who wait longest: each wakes one, since all of them would ask as often as there are replicas."""
        while self._waiting and self._going < self._at_once():
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            self._going += 1
            if not turn.done():
                turn.set_result(None)
