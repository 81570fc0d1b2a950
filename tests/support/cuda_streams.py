"""Streams of a GPU for a machine without one: a CPU's tensors take the way of a GPU's, and everything runs at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Queue:
    """A stream, or an event in one."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Queue) -> None: ...

    def wait_event(self, event: Queue) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def run_at_once(replace: Callable[[object, str, object], None] = setattr) -> None:
    """From now on; `replace` may be that of a `MonkeyPatch`."""
    for name, replacement in {"Stream": Queue, "Event": Queue, "current_stream": Queue, "stream": nullcontext}.items():
        replace(torch.cuda, name, replacement)
