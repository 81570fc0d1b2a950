"""The start of a server that several rollouts use: all that need it wait for the one attempt under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

StartedT = TypeVar("StartedT")


class SharedStart(Generic[StartedT]):
    """Makes an attempt where somebody asks and none is under way. Belongs to one event loop."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, StartedT]]) -> None:
        self._start = start
        self._attempt: asyncio.Task[StartedT] | None = None
        self._waiting = 0

    async def result(self) -> StartedT:
        """What the start returns or raises: the same for all that wait for it. The last to leave cancels it."""
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._start())
        attempt = self._attempt
        self._waiting += 1
        try:
            return await asyncio.shield(attempt)
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._attempt = None
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
