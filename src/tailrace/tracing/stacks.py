"""Where a process stands: the frames in which its tasks wait, written down when somebody asks for them."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

STACKS = signal.SIGUSR2
"""Lets a process of a run write into its log where it stands."""
_MOST_FRAMES = 12
_MOST_STACKS = 50


def frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Those that a suspended task waits in, the outermost first; `Task.get_stack` knows that one alone."""
    awaiting: object = task.get_coro()
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "gi_frame", None)
        if frame is not None:
            yield frame
        is_generator = inspect.isgenerator(awaiting)
        awaiting = getattr(awaiting, "gi_yieldfrom" if is_generator else "cr_await", None)


def write_task_stacks(file: TextIO) -> None:
    """Where the tasks of the running event loop wait; those that wait alike are told once, with their number."""
    stacks = Counter(map(_stack_of, asyncio.all_tasks()))
    for stack, count in stacks.most_common(_MOST_STACKS):
        file.write(f"\n{count} {'task waits' if count == 1 else 'tasks wait'} here (most recent call last):\n{stack}")
    file.flush()


def _stack_of(task: asyncio.Task[Any]) -> str:
    frames = [*frames_of(task)][-_MOST_FRAMES:]
    return "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())


def write_stacks_when_asked() -> None:
    """From now on `STACKS` lets this process tell on standard error where its threads stand, and where tasks wait.

    On the event loop, in the main thread. Threads are told of even while the loop is held.
    """
    asyncio.get_running_loop().add_signal_handler(STACKS, write_task_stacks, sys.stderr)
    faulthandler.register(STACKS, chain=True)
