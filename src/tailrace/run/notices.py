"""A notice of preemption by a file: `touch runs/<name>/preempt`, where a signal cannot be sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

NOTICE = "preempt"
_LOOK_EVERY_S = 1.0


async def wait_for_notice(folder: Path, on_notice: Callable[[], None]) -> None:
    """Wait for the file, and remove it: the run that is resumed here is not meant. One that was there before is not."""
    notice = folder / NOTICE
    await asyncio.to_thread(_remove, notice)
    while not await asyncio.to_thread(_remove, notice):  # noqa: ASYNC110 - a file of somebody else's has no event
        await asyncio.sleep(_LOOK_EVERY_S)
    on_notice()


def _remove(path: Path) -> bool:
    """Whether it was there. A disk that cannot say has none."""
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False
