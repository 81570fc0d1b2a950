"""A notice of preemption by a file: `touch runs/<name>/preempt`, where a signal cannot be sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

NOTICE = "preempt"
_LOOK_EVERY_S = 1.0


async def wait_for_notice(folder: Path, on_notice: Callable[[], None]) -> None:
    """Wait for the file, and remove it: the run that is resumed here is not meant.

    One that came while this process started counts, however long that took; one of before it is not meant for it.
    """
    while not await asyncio.to_thread(_is_given, folder / NOTICE):  # noqa: ASYNC110 - of somebody else's, without event
        await asyncio.sleep(_LOOK_EVERY_S)
    on_notice()


def _is_given(notice: Path) -> bool:
    """Whether it was there, and is younger than this process. A disk that cannot say has none."""
    with contextlib.suppress(OSError):
        written_s = notice.stat().st_mtime
        os.utime(notice.parent)  # so that both times are of the file system's own clock
        age_s = notice.parent.stat().st_mtime - written_s
        notice.unlink()
        return age_s <= time.time() - psutil.Process().create_time()
    return False
