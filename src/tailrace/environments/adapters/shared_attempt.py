"""What several rollouts need done once, such as the start of a server: all wait for the one attempt under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tailrace.cancelling import cancelled

MadeT = TypeVar("MadeT")


class SharedAttempt(Generic[MadeT]):
    """Makes an attempt where somebody asks and none is under way. Belongs to one event loop."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, MadeT]]) -> None:
        self._make = make
        self._attempt: asyncio.Task[MadeT] | None = None
        self._waiting = 0

    async def result(self) -> MadeT:
        """What the attempt returns or raises: the same for all that ask until the last of them has it.

        The last to leave cancels it.
        """
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._make())
        attempt = self._attempt
        self._waiting += 1
        try:
            return await asyncio.shield(attempt)
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._attempt = None
                await cancelled(attempt)
