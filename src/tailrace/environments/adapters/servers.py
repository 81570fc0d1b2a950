"""What adapters of servers have in common: a first look at one, and the end of what its process wrote."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tailrace.errors import EnvironmentFailed, SettingsError

_KEPT_CHARACTERS = 2_000


def look_once(look: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, whether this thread runs an event loop or not.

    Raises `SettingsError` where it raises `EnvironmentFailed`: nothing was played yet.
    """
    try:
        with ThreadPoolExecutor(1) as aside:
            aside.submit(asyncio.run, look).result()
    except EnvironmentFailed as error:
        raise SettingsError(str(error)) from error


class ErrorOutput:
    """The end of what a server writes to its error output, through all its starts."""

    def __init__(self) -> None:
        self._written = ""

    @property
    def said(self) -> str:
        """Of it, what a message shows."""
        return self._written.strip()

    async def listen(self, process: Process) -> None:
        """Until it is closed."""
        assert process.stderr is not None  # it has a pipe
        while piece := await process.stderr.read(1 << 16):
            self._written = (self._written + piece.decode(errors="replace"))[-_KEPT_CHARACTERS:]
