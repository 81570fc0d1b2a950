"""A deadline for progress: fires when outstanding work does not move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

GRACE_S = 1.0
"""After a deadline: this process may have stood still itself, with progress unread in its sockets."""


class ProgressDeadline:
    """Calls `on_overdue` once when work was outstanding for `deadline_s` without `progress`. One timer, no task."""

    def __init__(self, deadline_s: float, on_overdue: Callable[[], None]) -> None:
        self._deadline_s, self._on_overdue = deadline_s, on_overdue
        self._loop = asyncio.get_running_loop()
        self._outstanding = 0
        self._since_s = self._loop.time()
        self._suspected = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Work starts."""
        if self._outstanding == 0:
            self.progress()
        self._outstanding += 1
        if self._timer is None:
            self._timer = self._loop.call_at(self._since_s + self._deadline_s, self._check)

    def end(self) -> None:
        """Work ends."""
        self._outstanding -= 1

    def progress(self) -> None:
        """Work moved."""
        self._since_s = self._loop.time()
        self._suspected = False

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._outstanding == 0:
            return
        due_s, now_s = self._since_s + self._deadline_s, self._loop.time()
        if now_s < due_s:
            self._timer = self._loop.call_at(due_s, self._check)
        elif not self._suspected:
            self._suspected = True
            self._timer = self._loop.call_at(now_s + min(GRACE_S, self._deadline_s), self._check)
        else:
            self._on_overdue()
